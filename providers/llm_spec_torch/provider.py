"""TorchProvider: a chat model from a checkpoint, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from llm_spec.kit.local_provider import TokenModelProvider
from llm_spec_torch.model import TorchModel
from llm_spec_torch.options import TorchOptions

__all__ = ["TorchProvider"]


class TorchProvider(TokenModelProvider[TorchModel]):
    """Answers with a local checkpoint, in a worker thread.

    Arguments and errors are those of TorchModel. `model` may also be a loaded TorchModel, to share
    its weights: `TorchProvider(target_model.make_early_exit_draft(4))` drafts with the first four
    layers of a target.
    """

    def __init__(
        self, model: TorchModel | str | Path, *, name: str | None = None, **options: Unpack[TorchOptions]
    ) -> None:
        super().__init__(model if isinstance(model, TorchModel) else TorchModel(model, name=name, **options))
