"""One transformer, four policies: the trained LoRA, the sampling LoRA `old`, the LoRA's EMA, and the base without LoRA.

The pipeline keeps its own classes: peft layers are injected into its `SD3Transformer2DModel`, and the export is a LoRA
file in diffusers' format.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

from integrations.diffusion_nft.config import Averages, Lora, UserError

TRAINED, SAMPLING = "default", "old"


def old_decay(kind: str, step: int) -> float:
    """η of θ_old ← η θ_old + (1−η) θ after optimizer step `step` (counted from 1).

    Types 0, 1 and 2 are DiffusionNFT's, `marble` is that of MARBLE's run.
    """
    if kind == "0":
        return 0.0
    if kind == "1":
        return min(0.001 * step, 0.5)
    if kind == "2":
        return min(0.0075 * max(step - 75, 0), 0.999)
    if kind == "marble":
        return min(0.001 * step, 0.95)
    raise ValueError(f"old-policy decay must be '0', '1', '2' or 'marble', got {kind!r}")


def ema_decay(step: int, maximum: float) -> float:
    """The warmed-up decay of the LoRA's EMA after optimizer step `step`: min((1+s)/(10+s), maximum)."""
    return min((1 + step) / (10 + step), maximum)


class Policy:
    """The LoRA policies on a pipeline's transformer.

    Outside the context managers the trained adapter is active, and it alone requires gradients.

    Args:
        pipeline: Its transformer gets the adapters; all its own weights are frozen.
        lora: Rank, scale and target modules.
        averages: How `old` and the EMA follow the trained weights.

    Raises:
        UserError: The target modules are not in the transformer.
    """

    def __init__(self, pipeline: StableDiffusion3Pipeline, lora: Lora, averages: Averages) -> None:
        self.transformer = pipeline.transformer
        self._averages = averages
        self.transformer.requires_grad_(False)
        for name in (TRAINED, SAMPLING):
            config = LoraConfig(
                r=lora.rank, lora_alpha=lora.alpha, init_lora_weights="gaussian", target_modules=list(lora.targets)
            )
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # two are meant
                    self.transformer.add_adapter(config, name)
            except ValueError as error:
                raise UserError(f"lora.targets={lora.targets}: {' '.join(str(error).split())}") from None
        self._trained = self._named(TRAINED)
        self._sampling = self._named(SAMPLING)
        for name, parameter in self._sampling.items():
            parameter.data.copy_(self._trained[name])
        # Clones: on the CPU, .detach() alone would share storage with the live weights.
        self._ema = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        self.transformer.set_adapter(TRAINED)

    def _named(self, adapter: str) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters under names without the adapter's own."""
        marker = f".{adapter}."
        return {n.replace(marker, "."): p for n, p in self.transformer.named_parameters() if marker in n}

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The trained LoRA parameters, in a fixed order."""
        return list(self._trained.values())

    @property
    def is_on_policy(self) -> bool:
        """Whether `old` is the trained LoRA itself at every step, so that its forward need not be made twice."""
        return self._averages.old_decay == "0"

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Inside, the transformer is the policy that samples (`old`)."""
        self.transformer.set_adapter(SAMPLING)
        try:
            yield
        finally:
            self.transformer.set_adapter(TRAINED)

    @contextmanager
    def base(self) -> Iterator[None]:
        """Inside, the transformer is the pre-trained model: adapters off."""
        self.transformer.disable_adapters()
        try:
            yield
        finally:
            self.transformer.enable_adapters()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the trained adapter holds its EMA: for evaluation and export."""
        live = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        self._write(self._trained, self._ema)
        try:
            yield
        finally:
            self._write(self._trained, live)

    @torch.no_grad()
    def follow(self, step: int) -> dict[str, float]:
        """Move the EMA and `old` after optimizer step `step` (from 1); returns the two decays used."""
        decays = {"ema": ema_decay(step, self._averages.ema_max), "old": old_decay(self._averages.old_decay, step)}
        for name, parameter in self._trained.items():
            self._ema[name].lerp_(parameter, 1 - decays["ema"])
            self._sampling[name].lerp_(parameter, 1 - decays["old"])
        return decays

    def export(self, folder: Path) -> None:
        """Write the EMA weights as a LoRA that `pipe.load_lora_weights(folder)` reads.

        The metadata carries α and the rank; without it the LoRA would load at scale 1 instead of α/r.
        """
        with self.averaged():
            layers = get_peft_model_state_dict(self.transformer, adapter_name=TRAINED)
            StableDiffusion3Pipeline.save_lora_weights(
                folder,
                transformer_lora_layers={name: tensor.contiguous() for name, tensor in layers.items()},
                transformer_lora_adapter_metadata=self.transformer.peft_config[TRAINED].to_dict(),
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All three sets of LoRA weights, cloned, under `trained.`, `old.` and `ema.`."""
        return {f"{s}.{n}": t.detach().clone() for s, tensors in self._sets().items() for n, t in tensors.items()}

    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            UserError: It is from another LoRA or another model.
        """
        for prefix, tensors in self._sets().items():
            given = {n.removeprefix(f"{prefix}."): t for n, t in state_dict.items() if n.startswith(f"{prefix}.")}
            if {n: t.shape for n, t in given.items()} != {n: t.shape for n, t in tensors.items()}:
                raise UserError("the checkpoint's LoRA has other layers or another rank than this model's")
            self._write(tensors, given)

    def _sets(self) -> dict[str, Mapping[str, torch.Tensor]]:
        return {"trained": self._trained, "old": self._sampling, "ema": self._ema}

    @staticmethod
    @torch.no_grad()
    def _write(target: Mapping[str, torch.Tensor], source: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in target.items():
            tensor.copy_(source[name])
