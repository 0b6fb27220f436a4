"""The whole engine on a small model in float32: speculation on and off give the same tokens."""

from __future__ import annotations

from typing import Any

import torch
from tools.gpu_check.finding import Finding, Findings, skipped
from tools.gpu_check.target import model_of

_SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "initializer_range": 0.2,
}
_NEW = 96


def find(device: torch.device) -> Findings:
    """Eight requests at once that repeat themselves."""
    try:
        import outrider_serving.engine.core  # noqa: F401
    except ModuleNotFoundError as error:
        yield skipped(f"no {error.name}")
        return
    from outrider_serving.engine.target.cuda.runner import CudaRunner
    from outrider_serving.settings import Method

    runs = {method: _run(method, device) for method in (Method.NONE, Method.NGRAM)}
    for method, (_, accepted, runner) in runs.items():
        graphs = isinstance(runner, CudaRunner) and runner.captured > 0 and runner.fallbacks == 0
        figure = (
            f"captured {runner.captured}, {runner.fallbacks} without"
            if isinstance(runner, CudaRunner)
            else "none"
        )
        yield Finding(f"graphs, {method}", f"{figure}; {accepted} proposed tokens accepted", graphs)
    equal = runs[Method.NONE][0] == runs[Method.NGRAM][0]
    yield Finding("greedy tokens with n-gram on and off", "equal" if equal else "differ", equal)
    yield Finding("proposed tokens were accepted", str(runs[Method.NGRAM][1]), runs[Method.NGRAM][1] > 0)


def _run(method: Any, device: torch.device) -> tuple[dict[str, list[int]], int, object]:
    """Tokens of each request, how many proposed ones were accepted, and the runner."""
    from outrider_serving.depth import FullDepth
    from outrider_serving.engine.core import EngineCore
    from outrider_serving.engine.schedule.scheduler import EngineLimits
    from outrider_serving.engine.target.kv import KVShape
    from outrider_serving.engine.types import Labels, Request, SamplingClass, SamplingParams
    from outrider_serving.models.loading import LoadedModel
    from outrider_serving.settings import Proposer, default_settings

    loaded = LoadedModel(
        model=model_of(_SHAPE, device, torch.float32),
        tokenizer=_tokenizer(),
        source="random",
        revision="none",
        dtype="float32",
        context_length=512,
        eos_token_ids=frozenset({257}),
        vocab_size=258,
        kv_shapes={layer: KVShape(2, 16, 16) for layer in range(3)},
    )
    limits = EngineLimits(pages=512, page_size=16, max_running=8, max_waiting=8, step_tokens=256)
    core = EngineCore(loaded, default_settings(Proposer(method=method)), limits, depths=FullDepth())
    tokens: dict[str, list[int]] = {}
    labels = Labels("other", "completions", SamplingClass.GREEDY, "stable", 0)
    for one in range(8):
        params = SamplingParams(max_tokens=_NEW, temperature=0, ignore_eos=True)
        core.submit(Request(f"r{one}", tuple(range(one, one + 5)) * 6, params, labels))
        tokens[f"r{one}"] = []
    accepted = 0
    while core.busy:
        output = core.step()
        for _, error in output.failures:
            raise error
        for delta in output.deltas:
            tokens[delta.request_id] += delta.tokens
            accepted += delta.accepted
    runner = core._stepper._runner
    core.close()
    return tokens, accepted, runner


def _tokenizer() -> Any:
    """One token a byte."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate([*alphabet, "<bos>", "<eos>"])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
