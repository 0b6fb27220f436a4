"""What an engine does that was not told."""

from outrider_serving.engine.options import EngineOptions


def test_defaults_go_by_the_device() -> None:
    options = EngineOptions("m")
    assert (options.memory_share_on("cuda"), options.memory_share_on("cpu")) == (0.9, 0.4)
    assert (options.step_tokens_on("cuda"), options.step_tokens_on("cpu")) == (2048, 512)


def test_what_is_given_goes_before_the_device() -> None:
    options = EngineOptions("m", memory_share=0.7, step_tokens=64)
    assert {options.memory_share_on(device) for device in ("cuda", "cpu")} == {0.7}
    assert {options.step_tokens_on(device) for device in ("cuda", "cpu")} == {64}


def test_every_running_request_has_a_token_in_a_step() -> None:
    assert EngineOptions("m", max_running=1000).step_tokens_on("cpu") == 1000
