"""What is paired with what, against a plain numpy oracle that walks one text slot by slot and shifts nothing; and that the policy only teaches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.distillation.draft_losses_test import DRAFTERS, PROMPT, SPEC, batch_of, frozen_of, params_of, policy, texts, trained
from tlt_jax.distillation import draft_losses
from tlt_jax.distillation.draft_losses import DraftLoss, draft_objective
from tlt_jax.distillation.pairs import Frozen, counted, shifted, teach
from tlt_jax.drafters.feature_drafter import FeatureDrafter, policy_head
from tlt_jax.models import decoder

SETTINGS = DraftLoss(temperature=0.7, steps=3, feature_weight=0.3)
each_kind = pytest.mark.parametrize("name", ["eagle", "eagle3"])


def plain_params(drafter):
    """Without queries attention is the mean of what is seen, and without `down` the MLP says nothing: the layer fits into a few lines of numpy.

    Other kernels of fc and values, since a new drafter's hardly read the token.
    """
    params, random = params_of(drafter), np.random.default_rng(2)
    fc, attention, mlp = (params["layer"][part] for part in ("fc", "attention", "mlp"))

    def other(part, size):
        return {"kernel": jnp.asarray(random.normal(size=part["kernel"].shape) * size, jnp.float32)}

    attention = attention | {"query": other(attention["query"], 0), "value": other(attention["value"], 0.5)}
    return params | {"layer": params["layer"] | {"fc": fc | other(fc, 0.3), "attention": attention, "mlp": mlp | {"down": other(mlp["down"], 0)}}}


def softmax(logits):
    odds = np.exp(logits - logits.max())
    return odds / odds.sum()


class Oracle:
    """The loss and the metrics of one text at a time: slot t reads the feature of t and token t + 1 + s, and at unroll step s is compared with the policy's
    distribution over token t + 2 + s, of all tokens renormalised over the draft tokens.
    """

    def __init__(self, name):
        drafter = DRAFTERS[name]
        self.capture, self.params = drafter.capture_layers, jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), plain_params(drafter))
        self.layer, self.ids = self.params["layer"], self.params["ids"].astype(int)
        self.embedding = policy()["embed"]["embedding"].astype(np.float64)
        self.seen = {step: [] for step in range(SETTINGS.steps)}  # of each step: (cross-entropy, Σ min, equal best tokens, SmoothL1) of each slot
        for text in texts():
            self.read(text)

    def read(self, text):
        out = decoder.forward(SPEC, policy(), text[None], capture_layers=self.capture)
        logits, final = np.asarray(out.logits_BTV[0], np.float64), np.asarray(out.features_BTD[0], np.float64)
        features = np.asarray(out.aux_features_BTF[0]) @ self.layer["fc"]["kernel"] if self.capture else final
        past = []
        for slot in range(len(text) - 1):
            g, own = features[slot], []
            for step in range(min(SETTINGS.steps, len(text) - 1 - slot)):
                residual, value = self.project(self.embedding[text[slot + 1 + step]], g)
                own.append(value)
                attended = np.repeat(np.mean([*past, *own], axis=0), SPEC.num_heads // SPEC.num_kv_heads, axis=0)
                g = residual + np.einsum("hc,hcd->d", attended, self.layer["attention"]["output"]["kernel"])
                if PROMPT <= slot + 2 + step < len(text):
                    self.seen[step].append(self.compare(g, logits[slot + 1 + step], final[slot + 1 + step]))
            past.append(own[0])

    def project(self, embedded, g):
        """(residual, value of the slot)."""
        if self.capture:
            residual, x = g, np.concatenate([self.norm("input_norm", embedded), self.norm("hidden_norm", g)])
        else:
            residual = x = np.concatenate([embedded, g]) @ self.layer["fc"]["kernel"] + self.layer["fc"]["bias"]
        return residual, np.einsum("x,xkc->kc", x, self.layer["attention"]["value"]["kernel"])

    def norm(self, name, x):
        return x / np.sqrt(np.mean(x**2) + SPEC.rms_norm_eps) * self.layer[name]["scale"]

    def compare(self, hidden, policy_logits, feature):
        drafted = self.norm("norm", hidden) @ self.params["head"]["kernel"] if self.capture else hidden @ self.embedding[self.ids].T
        q, full = softmax(drafted / SETTINGS.temperature), softmax(policy_logits / SETTINGS.temperature)
        p, distance = full[self.ids] / full[self.ids].sum(), np.abs(hidden - feature)
        smooth = np.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()
        return -(p * np.log(q)).sum(), np.minimum(p, q).sum(), float(p.argmax() == q.argmax()), smooth

    def result(self):
        """As `numbers` of the objective."""
        found, loss = {}, 0.0
        for step, slots in self.seen.items():
            cross, overlap, agrees, smooth = np.transpose(slots)
            loss += SETTINGS.decay**step * (cross + SETTINGS.feature_weight * smooth).sum()
            found |= {f"drafter/acceptance_{step}": overlap.mean(), f"drafter/agreement_{step}": agrees.mean()}
        return found | {"drafter/loss": loss / len(self.seen[0])}


@functools.cache
def expected(name):
    return Oracle(name).result()


def distance(name):
    """The largest difference to the oracle in the loss and each metric, of the objective on the texts in one row in another order."""
    drafter, order = DRAFTERS[name], texts()
    params = plain_params(drafter)
    _, metrics = draft_objective(drafter, SETTINGS, trained(params), (frozen_of(drafter, params), batch_of([[order[2], order[0], order[1]]], drafter)))
    assert metrics.keys() == expected(name).keys()
    return max(abs(float(mean.value) - expected(name)[key]) for key, mean in metrics.items())


@each_kind
def test_every_slot_is_compared_with_what_the_policy_says_of_the_token_after_those_it_read(name):
    assert distance(name) < 5e-5


@each_kind
@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("what", ["features", "tokens", "targets", "counted"])
def test_a_shift_by_one_is_seen(name, what, by, monkeypatch):
    unroll = FeatureDrafter.unroll

    def moved(drafter, params, embedded_BTD, features_BTF, places, steps):
        embedded_BTD = jnp.roll(embedded_BTD, by, axis=1) if what == "tokens" else embedded_BTD
        features_BTF = jnp.roll(features_BTF, by, axis=1) if what == "features" else features_BTF
        return unroll(drafter, params, embedded_BTD, features_BTF, places, steps)

    monkeypatch.setattr(FeatureDrafter, "unroll", moved)
    if what == "targets":
        monkeypatch.setattr(draft_losses, "shifted", lambda values, places: shifted(values, places + by))
    if what == "counted":
        monkeypatch.setattr(draft_losses, "counted", lambda batch, step: counted(batch, step + by))
    assert distance(name) > 1e-2


@each_kind
def test_no_gradient_reaches_the_policy_and_every_weight_of_the_drafter_gets_one(name):
    drafter = DRAFTERS[name]
    params, batch = params_of(drafter), batch_of([texts()], drafter)

    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(policy_params, weights):
        features_BTF, final_BTD = teach(SPEC, drafter.capture_layers, policy_params, batch)
        frozen = Frozen(policy_params["embed"]["embedding"], policy_head(SPEC, policy_params, params["ids"]))
        return draft_objective(drafter, SETTINGS, weights, (frozen, batch.replace(features_BTF=features_BTF, final_BTD=final_BTD)))[0].sum

    of_policy, of_drafter = gradients(policy(), trained(params))
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(of_policy))
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(of_drafter))


def test_the_policy_is_renormalised_over_the_draft_tokens_at_the_rollout_temperature(monkeypatch):
    """A drafter that foresees the policy's feature is always accepted, and its cross-entropy is the entropy of the policy among the draft tokens."""
    drafter, text = DRAFTERS["eagle"], texts()[1]
    params, batch = params_of(drafter), batch_of([[text]], drafter)
    monkeypatch.setattr(FeatureDrafter, "unroll", lambda *_: [jnp.roll(batch.final_BTD, -1, axis=1)])
    _, metrics = draft_objective(drafter, DraftLoss(temperature=0.7, steps=1), trained(params), (frozen_of(drafter, params), batch))
    logits = np.asarray(decoder.forward(SPEC, policy(), text[None]).logits_BTV[0], np.float64)
    entropies = []
    for token in range(PROMPT, len(text)):
        p = softmax(logits[token - 1] / 0.7)[np.asarray(params["ids"])]
        p = p / p.sum()
        entropies.append(-(p * np.log(p)).sum())
    assert float(metrics["drafter/loss"].value) == pytest.approx(np.mean(entropies), rel=1e-5)
    assert float(metrics["drafter/acceptance_0"].value) == pytest.approx(1.0) and float(metrics["drafter/agreement_0"].value) == 1.0
