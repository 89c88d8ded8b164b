"""The run's settings: pydantic models read from YAML, changed by `key=value`, and strict about names.

A wrong key or value raises `UserError`, one line that names the key, the value and the nearest right name.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

HERE = Path(__file__).resolve().parent
CONFIGS = HERE / "configs"
Sampler = Literal["euler", "dpm2"]
Count = Annotated[int, Field(ge=1)]


def _count_or_auto(value: Any) -> Any:
    """The value itself. One check of both forms, since of a union pydantic reports why it is neither, one by one."""
    if value in (None, "auto") or (type(value) is int and value >= 1):
        return value
    raise PydanticCustomError("count_or_auto", "input should be 'auto' or an integer of at least 1")


CountOrAuto = Annotated[int | Literal["auto"] | None, BeforeValidator(_count_or_auto)]


class UserError(ValueError):
    """A mistake in what the user gave; its message is one line and is shown without a traceback."""


class RunError(RuntimeError):
    """A run that cannot go on, for a reason outside the program; its message is one line."""


class Section(BaseModel):
    """A group of settings: unknown keys are errors and values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Prompts(Section):
    """Prompt files (`.txt`, or GenEval's `.jsonl`), relative to the working directory or to this folder.

    Every file, and within it every GenEval `tag` with and without quoted text, is a stratum. Training draws from each
    stratum in proportion to its share, evaluation equally.
    """

    train: list[str] = Field(min_length=1)
    held_out: list[str] = Field(min_length=1)
    shares: list[Count] | None = Field(
        default=None,
        description="one per training stratum, in the files' order; [9, 1]: one prompt in ten from the second",
    )


class Lora(Section):
    """The low-rank adapter on the transformer's attention projections."""

    rank: int = Field(default=32, ge=1)
    alpha: float = Field(default=64, gt=0)
    targets: list[str] = [
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
        "attn.to_add_out",
    ]


class Rollout(Section):
    """The pictures one optimizer step learns from."""

    prompts: int = Field(default=48, ge=1, description="prompts per optimizer step")
    images_per_prompt: int = Field(default=24, ge=2, description="pictures per prompt: the group of the advantages")
    steps: int = Field(default=25, ge=2, description="sampling steps")
    sampler: Sampler = "dpm2"
    batch: int = Field(default=9, ge=1, description="pictures sampled and scored at a time")


class Loss(Section):
    """DiffusionNFT's loss; the symbols are those of the paper."""

    beta: float = Field(default=0.1, gt=0)
    kl: float = Field(default=1e-4, ge=0, description="weight of the KL term (0: no reference forward)")
    advantage_clip: float = Field(default=5.0, gt=0, description="A_max")
    timestep_fraction: float = Field(default=0.99, gt=0, le=1, description="share of the sampling timesteps trained on")
    train_timesteps: Count | None = Field(default=None, description="fewer timesteps per picture")
    signal_gradients: bool = Field(
        default=False, description="balance the gradients without the pull to `old` that all rewards share"
    )
    micro_batch: int = Field(default=9, ge=1, description="pictures per forward")


class Optimizer(Section):
    """AdamW and the gradient clip."""

    lr: float = Field(default=3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=1e-4, ge=0)
    eps: float = Field(default=1e-8, gt=0)
    max_grad_norm: float = Field(default=1.0, gt=0)


class Balance(Section):
    """How the objectives' gradients become one update; see `BalancedOptimizer` for the meaning of each."""

    options: dict[str, Any] = Field(
        default={}, description="the balancer's own; preference, floor and ceiling also by name: {preference: {ocr: 2}}"
    )
    ema_decay: Annotated[float, Field(ge=0, lt=1)] | None = Field(default=None, description="null: the method's own")
    refresh_every: int = Field(default=1, ge=1)
    refresh_micro_batches: CountOrAuto = Field(
        default=None, description="how many a refresh measures; null: all; auto: as the noise asks, needs split"
    )
    gramian_estimator: Literal["plain", "split", "history"] = Field(
        default="plain", description="split compares micro-batches, history steps, to tell signal from noise"
    )
    estimator_options: dict[str, Any] = Field(default={}, description="the estimator's own, e.g. ema_decay")
    uniform_after: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="from this step on equal weights; null: never"
    )


class WeightedSum(Section):
    """The comparison methods with one objective: the weighted sum of the raw rewards, and GDPO's of the normalised."""

    weights: list[float] | None = Field(default=None, description="one per reward; default 1 each; not for gdpo")
    measure_every: int = Field(default=5, ge=1, description="steps between measurements of the cosines")


class Averages(Section):
    """The two averages of the LoRA weights: the sampling policy `old` and the evaluated EMA."""

    old_decay: Literal["0", "1", "2", "marble"] = "marble"
    ema_max: float = Field(default=0.9, ge=0, lt=1)


class Evaluation(Section):
    """Held-out measurement: the same prompts and noise every time."""

    seed: int = 0
    steps: int = Field(default=40, ge=2)
    sampler: Sampler = "euler"
    pictures: int = Field(default=512, ge=1, description="in equal shares from every stratum; prompts repeat as needed")
    images_per_prompt: int = Field(default=1, ge=1, description="pictures in a row from one prompt")
    batch: int = Field(default=16, ge=1)
    every: int = Field(default=0, ge=0, description="steps between evaluations; 0: only before and after")
    grid: int = Field(default=16, ge=1, description="pictures in samples/*.png")


class Config(Section):
    """Everything that decides a run."""

    seed: int = Field(default=42, ge=0)
    pipeline: str = Field(description="'tiny', or what StableDiffusion3Pipeline.from_pretrained takes")
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1, mps, …")
    threads: Count | None = Field(default=None, description="torch's CPU threads; null leaves them")
    size: Annotated[int, Field(ge=8)] | None = Field(
        default=None, description="picture side in pixels; null: the model's own"
    )
    max_sequence_length: int = Field(default=128, ge=1, description="T5 tokens")
    prompts: Prompts
    rewards: list[str] = Field(min_length=1)
    held_out_rewards: list[str] = Field(default=[], description="measured on the held-out prompts, never trained on")
    reward_scale: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default={}, description="training sees a reward times this; held-out measurements stay in its own units"
    )
    method: str = Field(default="marble", description="a balancer's name, weighted_sum (of the raw rewards) or gdpo")
    caps: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default={}, description="a reward whose moving mean is beyond its cap leaves the balance until it falls"
    )
    reward_dropout: float = Field(default=0.0, ge=0, lt=1, description="chance that a reward sits a step out")
    reward_groups: list[Annotated[list[str], Field(min_length=1)]] = Field(
        default=[], description="rewards that count as one, their mean; each of the others is a group of its own"
    )
    allocate_prompts: Literal["fixed", "signal"] = Field(
        default="fixed", description="signal: more prompts for strata whose rewards are drowned in noise"
    )
    steps: int = Field(ge=1, description="optimizer steps")
    save_every: int = Field(default=30, ge=1)
    lora: Lora = Lora()
    rollout: Rollout = Rollout()
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    balance: Balance = Balance()
    weighted_sum: WeightedSum = WeightedSum()
    averages: Averages = Averages()
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _scaled_rewards_are_trained_on(self) -> Config:
        for name in self.reward_scale:
            if name not in self.rewards:
                raise ValueError(
                    f"reward_scale names {name!r}, which is not among the rewards ({', '.join(self.rewards)})"
                )
        return self

    def to_yaml(self) -> str:
        """The whole resolved config as YAML that `load_config` reads back to an equal config."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def find_config(name: str) -> Path:
    """The file of a config: a path, or the name of a file in `configs/`."""
    for path in (Path(name), CONFIGS / f"{name}.yaml"):
        if path.is_file():
            return path
    known = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    raise UserError(f"config {name!r} not found{_nearest(name, known)}; known: {', '.join(known)}, or give a YAML file")


def load_config(name: str, overrides: list[str] | None = None) -> Config:
    """Read a config and apply overrides.

    Args:
        name: A config's name or the path of a YAML file.
        overrides: `key=value` strings; dotted keys reach into sections and values are YAML.

    Raises:
        UserError: The file, a key or a value is wrong.
    """
    path = find_config(name)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise UserError(f"{path} is not readable YAML: {_one_line(error)}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path} must hold settings as `key: value`, not {type(raw).__name__}")
    for override in overrides or []:
        _apply(raw, override)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise UserError(_explain(error, path)) from None


def check_rewards(key: str, names: Iterable[str], rewards: Sequence[str]) -> None:
    """Raise `UserError` if a setting names a reward that the run does not train on."""
    for name in names:
        if name not in rewards:
            raise UserError(f"{key} names {name!r}, which is no reward of this run{_nearest(name, list(rewards))}")


def resolve_path(name: str) -> Path:
    """A file given in a config: relative to the working directory, else to this folder."""
    for path in (Path(name), HERE / name):
        if path.exists():
            return path
    raise UserError(f"{name} not found (looked in {Path.cwd()} and {HERE})")


def _apply(raw: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise UserError(f"override {override!r} is not key=value, e.g. seed=1 or optimizer.lr=1e-4")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the value of {override!r} is not YAML: {_one_line(error)}") from None
    for part in parts[:-1]:
        raw = raw.setdefault(part, {})
        if not isinstance(raw, dict):
            raise UserError(f"override {override!r}: {part!r} is a single value, not a section with keys")
    raw[parts[-1]] = value


def _explain(error: ValidationError, path: Path) -> str:
    """The first problem in one line, and how many more there are."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        *section, name = problem["loc"]
        text = f"unknown key {key!r}{_nearest(str(name), _keys_at(section), section)}"
    elif problem["type"] == "missing":
        text = f"key {key!r} is missing"
    elif not key:  # several keys do not fit each other
        text = str(problem["ctx"]["error"])
    else:
        text = f"{key}={problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return f"{path.name}: {text}{more}"


def _keys_at(location: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location:
        model = model.model_fields[str(part)].annotation  # type: ignore[assignment]
    return list(model.model_fields)


def _nearest(name: str, known: list[str], location: Sequence[int | str] = ()) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f", did you mean {'.'.join([*map(str, location), close[0]])!r}?"
    return f" (known here: {', '.join(known)})" if location or known else ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
