"""From config words to a drafter, its weights and how the slices use it."""

import numpy as np

from tlt_jax.checkpoints.drafter_files import DrafterFiles, drafter_kind, load_drafter, read_drafter
from tlt_jax.drafters.drafter import Drafter
from tlt_jax.drafters.eagle import Eagle
from tlt_jax.drafters.eagle3 import Eagle3, default_capture
from tlt_jax.drafters.feature_drafter import FeatureDrafter, layer_like
from tlt_jax.drafters.prompt_lookup import PromptLookup
from tlt_jax.drafters.truncated import Truncated
from tlt_jax.models.specs import PolicySpec
from tlt_jax.training.settings import Config

TEXTS_A_SLOT = 2  # that prompt_lookup keeps: the rows' own, and finished ones or earlier answers
AUTO_SHARE = 4  # drafter.truncated_layers=0: a quarter of the layers


def use_files(config: Config, path: str) -> None:
    """Makes `path` the drafter of the config, as --drafter asks: its files say which method it is. Raises FileNotFoundError without them."""
    config.drafter.path, config.speculative.method = path, drafter_kind(path)


def make_drafter(config: Config, spec: PolicySpec) -> Drafter | None:
    """The drafter of the config for a policy, None when rollouts are plain; its files are checked and no tensor is read."""
    method, settings = config.speculative.method, config.drafter
    if method == "off":
        return None
    if method == "prompt_lookup":
        return PromptLookup(settings.lookup_length, TEXTS_A_SLOT * config.rollout.slots)
    if method == "truncated":
        layers = settings.truncated_layers or max(1, spec.num_layers // AUTO_SHARE)
        if layers > spec.num_layers:
            raise ValueError(f"drafter.truncated_layers={layers}: the policy has {spec.num_layers} layers")
        return Truncated(spec, layers)
    if not settings.path:
        capture = tuple(map(int, settings.capture_layers)) or None
        return _described(spec, DrafterFiles(method, layer_like(spec), settings.draft_vocab_size, capture))
    files = read_drafter(settings.path, spec)
    if files.kind != method:
        raise ValueError(f"drafter.path={settings.path} is an {files.kind} drafter: set speculative.method={files.kind}")
    return _described(spec, files)


def load_params(config: Config, spec: PolicySpec, dtype: str) -> dict | None:
    """The drafter's weights where the config has a path; None: they are made from the policy."""
    return load_drafter(config.drafter.path, spec, dtype=dtype).params if config.drafter.path else None


def draft_ids(config: Config, drafter: FeatureDrafter) -> np.ndarray | None:
    """Global ids of the draft tokens of a run with this config: those of its files, else the lowest; None when every token is one."""
    if config.drafter.path:
        return load_params(config, drafter.spec, "float32").get("ids")
    return np.arange(drafter.vocabulary, dtype=np.int32) if drafter.vocabulary else None


def files_of(config: Config, drafter: FeatureDrafter) -> DrafterFiles:
    """The drafter as its directory describes it."""
    return DrafterFiles(config.speculative.method, drafter.layer_spec, drafter.vocabulary, drafter.capture_layers or None)


def _described(spec: PolicySpec, files: DrafterFiles) -> Drafter:
    if files.kind == "eagle":
        return Eagle(spec, files.layer_spec, files.vocabulary)
    capture = files.capture_layers or default_capture(spec.num_layers)
    if max(capture) >= spec.num_layers:
        raise ValueError(f"the drafter reads the inputs of layers {capture}, and the policy has layers 0 to {spec.num_layers - 1}")
    return Eagle3(spec, files.layer_spec, files.vocabulary or spec.vocab_size, tuple(capture))
