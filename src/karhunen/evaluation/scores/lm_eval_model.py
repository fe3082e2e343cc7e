"""Our cache as a model type of lm-eval, so that every task it knows is scored through a codec.

    log-likelihood: the text is read CHUNK_TOKENS at a time, each chunk from the coded tokens before it
    generation:     the prompt is read exactly and coded, each new token reads the coded cache

The whole class of lm-eval's own `hf` model is kept (templates, batches, padding); only its two calls of the model go
through a compressed cache. Under a codec that codes nothing the scores are those of `hf`.
"""

from pathlib import Path
from typing import Any, cast, final

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from karhunen.codec import Codec
from karhunen.hf.cache import CompressedCache
from karhunen.hf.compressed import compressed
from karhunen.hf.probe import cache_argument
from karhunen.store.report import Report

CHUNK_TOKENS = 64


@final  # lm-eval's decorator makes a plain `LM` of HFLM in the eyes of a type checker
class KarhunenLM(HFLM):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """`hf` with a codec: `pretrained` and all other arguments are those of `hf`."""

    def __init__(
        self, pretrained: Any, codec: Codec | str | Path, chunk_tokens: int | str = CHUNK_TOKENS, **kwargs: Any
    ) -> None:
        super().__init__(pretrained=pretrained, **kwargs)  # pyright: ignore[reportCallIssue]
        self.codec = codec if isinstance(codec, Codec) else Codec.from_pretrained(codec)
        self.chunk_tokens = int(chunk_tokens)
        self.report: Report | None = None
        CompressedCache(self._plain_model, self.codec).close()  # refuses another model's codec before the tasks load

    @property
    def _plain_model(self) -> Any:
        return cast("Any", self).model

    def _model_call(self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Logits [b t v]. Rows are padded on the right, where no token reads them."""
        if attn_mask is not None or labels is not None:
            raise ValueError("only decoder models have a cache to compress")
        model = self._plain_model
        with torch.no_grad():
            cache = CompressedCache(model, self.codec)
            arguments = {cache_argument(model): cache, "use_cache": True}
            logits = [model(input_ids=chunk, **arguments).logits for chunk in inps.split(self.chunk_tokens, dim=1)]
            self._remember(cache)
            cache.close()
        return torch.cat(logits, dim=1)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> Tensor:
        """Token ids, the prompt's first."""
        with compressed(self._plain_model, self.codec) as session:
            plain: Any = super()
            tokens = plain._model_generate(context, max_length, stop, **generation_kwargs)
            if session.cache is not None:
                self._remember(session.cache)
        return cast("Tensor", tokens)

    def _remember(self, cache: CompressedCache) -> None:
        """The report of the largest cache so far."""
        report = cache.report()
        if self.report is None or report.total.dense > self.report.total.dense:
            self.report = report


register_model("karhunen")(KarhunenLM)
