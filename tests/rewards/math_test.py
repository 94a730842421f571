"""Verdicts: the two tables of cases from the field, in every kind of process and thread, and input made to hang."""

import concurrent.futures
import contextlib
import time

import pytest

from tlt_jax.rewards import expressions, math
from tlt_jax.rewards.math import Verdict, explain, extract, verify

VERDICTS = [  # id, kind, reference, response, verdict
    ("M001", "fraction", r"\frac{3}{8}", r"So the value is $\boxed{0.375}$.", True),
    ("M002", "fraction", "1/3", r"$\boxed{\frac13}$", True),
    ("M004", "fraction", r"\frac{23}{5}", "The answer is 4 3/5.", True),
    ("M005", "fraction", "4", "The answer is 4 3/5.", False),
    ("M007", "fraction", r"\frac{7}{4}", r"$\boxed{1\frac{3}{4}}$", True),
    ("M008", "fraction", r"\frac{3}{4}", r"$\boxed{1\frac{3}{4}}$", False),
    ("M010", "radical", r"4\sqrt{2}", r"$\boxed{4}$", False),
    ("M011", "radical", r"\frac{\sqrt{3}}{3}", r"$\boxed{\frac{1}{\sqrt{3}}}$", True),
    ("M013", "radical", r"\sqrt{6}", r"$\boxed{\sqrt6}$", True),
    ("M014", "format", "12500", r"$\boxed{12{,}500}$", True),
    ("M016", "format", "12500", "The answer is 12,500.", True),
    ("M017", "format", "18", r"$\boxed{\$18}$", True),
    ("M019", "format", "16", r"$\boxed{016}$", True),
    ("M020", "format", "1000", r"$\boxed{1000.0}$", True),
    ("M022", "format", "12", r"$\boxed{\,12\ }$", True),
    ("M023", "format", "12", r"$\boxed{12.}$", True),
    ("M025", "gsm8k", "-7", "So it fell by seven degrees.\n#### -7", True),
    ("M026", "gsm8k", "-7", "So it fell.\n#### 7", False),
    ("M028", "gsm8k", "1080", "Total.\n#### 1,080", True),
    ("M031", "gsm8k", "41", "First try\n#### 41\nI made a slip.\n#### 42", False),
    ("M032", "gsm8k", "64", "Count.\n#### 64 apples", True),
    ("M034", "markdown", "73", "Sum is 468, halved 234. Final answer: **73**", True),
    ("M035", "markdown", "234", "Sum is 468, halved 234. Final answer: **73**", False),
    ("M037", "percent", r"35\%", r"$\boxed{0.35}$", True),
    ("M038", "percent", "0.35", r"$\boxed{35}$", False),
    ("M040", "units", r"90^\circ", r"$\boxed{90}$", True),
    ("M041", "units", r"15\text{ cm}^2", r"$\boxed{15}$", True),
    ("M043", "units", "120", r"$\boxed{120^\circ}$", True),
    ("M044", "units", "12:00", r"$\boxed{1:00}$", False),
    ("M046", "boxed", "3", r"First I got $\boxed{3}$; correcting, $\boxed{5}$.", False),
    ("M047", "boxed", "6", r"$\boxed{\boxed{6}}$", True),
    ("M049", "boxed", "0", r"$\boxed{}$", False),
    ("M050", "boxed", "", r"$\boxed{}$", False),
    ("M052", "boxed", "11", r"$\boxed{x = 11}$", True),
    ("M053", "boxed", "x = 11", r"$\boxed{11}$", True),
    ("M055", "boxed", r"\frac{1}{3}", r"$\boxed{k = \frac{1}{3} \approx 0.33}$", True),
    ("M056", "boxed", "C", r"$\boxed{\text{(C)}}$", True),
    ("M058", "boxed", r"\text{Maria}", r"$\boxed{Maria}$", True),
    ("M059", "boxed", r"\text{Maria}", r"$\boxed{\text{Mario}}$", False),
    ("M061", "junk", "42", r"$\boxed{42}$<|im_end|>", True),
    ("M062", "equation", "5 = 3a + b", r"$\boxed{3a + b}$", False),
    ("M064", "equation", "3x + 6y - 2 = 0", r"$\boxed{y = -\frac{1}{2}x + \frac{1}{3}}$", True),
    ("M065", "equation", "2x - 5y + 7 = 0", r"$\boxed{-2x + 5y - 7 = 0}$", True),
    ("M067", "equation", r"\frac{x^2}{9}+\frac{y^2}{4}=1", r"$\boxed{\frac{x^2}{18}+\frac{y^2}{8}=1}$", False),
    ("M068", "interval", "[0,5)", r"$\boxed{[0,5)}$", True),
    ("M070", "interval", r"(\frac{3}{5},\frac{5}{2}]", r"$\boxed{(0.6,2.5]}$", True),
    ("M071", "interval", r"(-1,0)\cup(2,3)", r"$\boxed{(2,3)\cup(-1,0)}$", True),
    ("M073", "interval", r"x \in [-2,7]", r"$\boxed{[-2,7]}$", True),
    ("M074", "interval", "[-4,0]", r"The values are \[ \boxed{[-4, 0]} \]", True),
    ("M076", "inequality", "3 < x < 8", r"$\boxed{(3,8)}$", True),
    ("M077", "inequality", r"x \le 5", r"$\boxed{5 \ge x}$", True),
    ("M079", "inequality", "x > 5", r"$\boxed{x < 5}$", False),
    ("M080", "set", r"\{1,2,3\}", r"$\boxed{\{3,1,2\}}$", True),
    ("M082", "set", r"\{1,2,3\}", r"$\boxed{\{1,2,3,4\}}$", False),
    ("M083", "set", r"7 \text{ and } 11", r"$\boxed{11}$", False),
    ("M085", "set", "-2,1", r"$\boxed{1,-2}$", True),
    ("M086", "set", "n = 2, 3, 4", r"$\boxed{n = 1, 2, 3}$", False),
    ("M088", "tuple", r"\left(3,\frac{\pi}{2}\right)", r"$\boxed{(3, \frac{2\pi}{3})}$", False),
    ("M089", "tuple", r"\left(1,\tfrac12\right)", r"$\boxed{(1, 0.5)}$", True),
    ("M091", "plusminus", r"\pm 15", r"$\boxed{15}$", False),
    ("M092", "plusminus", r"\pm 15", r"$\boxed{\{-15, 15\}}$", True),
    ("M094", "algebra", r"\tan^2(y)+1", r"$\boxed{\sec^2(y)}$", True),
    ("M095", "algebra", r"2\sin b \cos a", r"$\boxed{2\cos(a)\sin(b)}$", True),
    ("M097", "algebra", "x+2n+1", r"$\boxed{x+1}$", False),
    ("M098", "constant", r"1-\frac{1}{\mathrm{e}}", r"$\boxed{1+\frac{1}{\mathrm{e}}}$", False),
    ("M100", "tiny", r"\frac{1}{2^{80}}", r"$\boxed{\frac{1}{2^{81}}}$", False),
    ("M101", "tiny", r"\frac{1}{300!}", r"$\boxed{\frac{1}{301!}}$", False),
    ("M103", "matrix", r"\begin{pmatrix}1 & 2 \\ 3 & 4\end{pmatrix}", r"$\boxed{\begin{pmatrix}1 & 2 \\ 3 & 5\end{pmatrix}}$", False),
    ("M104", "base", "1121_3", r"$\boxed{1122_3}$", False),
    ("P01", "percent", r"28\%", r"$\boxed{28}$", True),
    ("P02", "fraction", r"\frac{1}{2}", r"$\boxed{\frac{2}{4}}$", True),
    ("P04", "rounding", r"2.\overline{3}", r"$\boxed{2.33}$", False),
    ("P05", "format", "32349", r"$\boxed{32, 349}$", False),
    ("P07", "format", "1000", "The answer is 1 000", True),
    ("P08", "boxed", "5", r"The value is $\boxed{5", False),
    ("P10", "boxed", "7", r"$\boxed 7$", True),
    ("P11", "boxed", r"\{1,2\}", r"$\boxed{1}\boxed{2}$", True),
    ("P13", "radical", r"\sqrt{\frac{1}{n}}", r"$\boxed{\frac{1}{\sqrt{n}}}$", True),
    ("P14", "tuple", "(1,3)", r"$\boxed{\{1,3\}}$", False),
]
TOO_MUCH = [
    r"$\boxed{9^{9^{9^{9}}}}$",
    r"$\boxed{\log(\log(\log(10^{10^{10}})))}$",
    "(" * 20_000,
    "7" * 200_000,
    r"$\boxed{" + "7" * 200_000 + "}$",
    r"\boxed{" * 9_000,
    "$ " * 20_000,
    r"\[" * 20_000,
    "<answer>" * 8_000,
    "answer is " * 6_000,
    " " * 90_000,
    r"$\boxed{10000000!}$",
    r"$\boxed{5!!!!!!}$",
    r"$\boxed{\binom{1000000}{500000}}$",
    r"$\boxed{e^{e^{e^{e^{e}}}}}$",
    r"$\boxed{\sum_{k=1}^{1000000000} \frac{1}{k}}$",
    r"$\boxed{" + r"\frac{1}{" * 40 + "1" + "}" * 40 + "}$",
    r"$\boxed{(x+y+z)^{1000}}$",
]
ODD = [
    "",
    " ",
    "\\",
    "$",
    "$$",
    r"\boxed",
    r"\boxed{",
    r"\boxed{}}",
    r"$\boxed{^}$",
    r"$\boxed{\frac{}{}}$",
    r"$\boxed{1/0}$",
    "\x00",
    "\ud800",
    "####",
    "**",
    "<answer></answer>",
    "</think>",
]


@pytest.mark.parametrize(("reference", "response", "expected"), [row[2:] for row in VERDICTS], ids=[row[0] for row in VERDICTS])
def test_the_verdict_is_the_one_that_the_mathematics_gives(reference, response, expected):
    verdict = explain(response, reference)
    assert verdict.ok is expected, verdict
    assert not verdict.reason.startswith("error:")


def test_verdicts_are_the_same_in_worker_threads():
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        verdicts = list(threads.map(lambda row: explain(row[3], row[2]), VERDICTS[::4]))
    assert [verdict.ok for verdict in verdicts] == [row[4] for row in VERDICTS[::4]]
    assert not [verdict for verdict in verdicts if verdict.reason.startswith("error:")]


@pytest.mark.parametrize("response", TOO_MUCH, ids=[f"{response[:24]!r}x{len(response)}" for response in TOO_MUCH])
def test_a_response_made_to_hang_is_wrong_soon_and_the_next_one_is_judged(response):
    started = time.process_time()
    assert verify(response, "5") is False
    assert verify(r"$\boxed{5}$", "5") is True
    assert time.process_time() - started < 10  # of the processor: what it would take without limits is hours


@pytest.mark.parametrize("reference", ["5", r"x^2+\sin x", "[1,2)", r"\{1,2\}", "x<5", "3x+2y=7", r"\text{Maria}", "C", "11:45", "1121_3", ""])
def test_odd_text_never_raises_and_never_scores(reference):
    for odd in ODD:
        verdict = explain(odd, reference)
        assert not verdict.ok and not verdict.reason.startswith("error:"), (odd, verdict)
        assert not explain(r"$\boxed{5}$", odd).ok


def test_text_after_a_stop_token_does_not_exist():
    for token in ("<|im_end|>", "</s>", "<|eot_id|>", "<|endoftext|>"):
        assert verify(rf"$\boxed{{4}}${token}$\boxed{{5}}$", "4")


def test_extract_stays_in_step_with_the_responses():
    responses = {r"\boxed{0.50}": "1/2", "I cannot tell.": None, "#### 1,080": "1080"}
    for order in (list(responses), list(responses)[::-1]):
        assert [extract(response) for response in order] == [responses[response] for response in order]


def test_a_fault_of_the_checker_is_told_from_a_wrong_answer(monkeypatch):
    def broken(reference, answer):
        raise MemoryError("no memory")

    monkeypatch.setattr(math, "_settled", broken)
    assert explain(r"\boxed{4}", "4") == Verdict(False, "4", "error: MemoryError: no memory")


def test_plain_numbers_do_not_reach_sympy(monkeypatch):
    def unwanted(work, **limits):
        raise AssertionError("sympy was asked")

    monkeypatch.setattr(expressions, "within_limits", unwanted)
    assert verify("She has 48+24 = 72.\n#### 72", "72") and not verify("#### 73", "72") and verify(r"\boxed{\frac{3}{8}}", "0.375")


def test_the_limits_hold_in_the_presence_of_broad_handlers_and_give_back_the_trace_function():
    def stubborn():
        while True:
            with contextlib.suppress(Exception):
                explain("", "")

    with pytest.raises(expressions.OutOfBudget):
        expressions.within_limits(stubborn, calls=10_000)
    with pytest.raises(expressions.OutOfBudget):
        expressions.within_limits(stubborn, seconds=0.05)
    assert expressions.within_limits(lambda: 7) == 7
