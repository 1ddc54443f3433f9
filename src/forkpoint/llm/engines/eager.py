"""A pass through the transformers model itself: what runs where no native program could be built, and what a program must agree with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forkpoint.llm.engines.base import Logits
from forkpoint.llm.resident.base import GroupSpec
from forkpoint.llm.resident.routed import STEP_KEYWORD, RoutedStep
from forkpoint.llm.resident.routes import Step
from forkpoint.llm.resident.tracing import Refusal


@final
class EagerExecutor:
    """Runs the model's own forward, operation by operation; attention goes to the pages of ``pages``."""

    name = "transformers"

    def __init__(self, model: Any, groups: Sequence[GroupSpec], pages: Sequence[Tensor]) -> None:
        self._model = model
        self._groups = tuple(groups)
        self._pages = tuple(pages)
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def run(self, step: Step, output_rows: NDArray[np.int64], *, threads: int) -> Logits:
        """Logits of ``output_rows``; without any, only keys and values are appended. ``threads`` is torch's own number."""
        assert threads == torch.get_num_threads()
        device = self._model.device
        ids, positions = (torch.from_numpy(each)[None].to(device) for each in (step.token_ids, step.positions))
        given = {"input_ids": ids, "position_ids": positions, "use_cache": False, STEP_KEYWORD: self._routed(step)}
        if not len(output_rows):
            self._model.base_model(**given)
            return np.empty((0, self._model.config.get_text_config().vocab_size), dtype=np.float32)
        wanted = torch.from_numpy(output_rows).to(device)
        keep = {"logits_to_keep": wanted} if self._keeps_rows else {}
        logits = self._model(**given, **keep).logits[0]
        return np.asarray((logits if self._keeps_rows else logits[wanted]).float().cpu().numpy())

    def rebind(self, pages: Sequence[Tensor]) -> Refusal | None:
        """Use other pages from the next pass on."""
        self._pages = tuple(pages)
        return None

    def _routed(self, step: Step) -> RoutedStep:
        device = self._model.device
        return RoutedStep(
            groups=self._groups,
            pages=self._pages,
            segments=torch.from_numpy(step.routes).to(device),
            tables=[torch.from_numpy(table).to(device) for table in step.tables],
        )
