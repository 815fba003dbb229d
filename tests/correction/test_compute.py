from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import sluice.correction.compute as room
import sluice.correction.tensors as checks
import sluice.correction.tokens as tokens
from sluice.correction import PRESETS, CorrectionMetrics, TrainInferCorrectionConfig, compute_train_infer_correction
from sluice.errors import ConfigError, CorrectionError
from tests.correction import naive, strategies

NAN, INF = math.nan, math.inf
ON = {"enabled": True}


def tensors(batch: Any, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask, old, inference = batch
    return torch.from_numpy(mask), torch.from_numpy(old).to(dtype), torch.from_numpy(inference).to(dtype)


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def ones(values: torch.Tensor) -> torch.Tensor:
    return torch.ones(values.shape, dtype=torch.bool)


def band(level: str, low: float | None = None, high: float | None = None, **more: Any) -> dict[str, Any]:
    return {"enabled": True, "agg_type": level, "ratio_low": low, "ratio_high": high, **more}


def weighted(level: str = "token", bound: float | None = None, **more: Any) -> dict[str, Any]:
    return {"is_weight": {"enabled": True, "weight_type": level, "upper_bound": bound, **more}}


def weights_under_mask(cfg: Any, mask: torch.Tensor, old: torch.Tensor, inference: torch.Tensor) -> list[float]:
    is_weight, _, _ = compute_train_infer_correction(cfg, mask, old, inference)
    return list(is_weight[mask.bool()].tolist())


# ---------------------------------------------------------------- against the definition


def assert_like_the_definition(cfg: Any, batch: Any, dtype: torch.dtype, *, rtol: float) -> None:
    mask, old, inference = tensors(batch, dtype)
    expected = naive.correct(cfg, mask.numpy(), old.double().numpy(), inference.double().numpy())
    assume(expected["margin"] > 1e-4)
    is_weight, filter_mask, metrics = compute_train_infer_correction(cfg, mask, old, inference)
    assert is_weight.shape == filter_mask.shape == mask.shape
    assert is_weight.dtype == torch.promote_types(dtype, torch.float32)
    assert is_weight.isfinite().all()
    at = mask.numpy()
    np.testing.assert_allclose(is_weight.double().numpy()[at], expected["is_weight"][at], rtol=rtol)
    np.testing.assert_array_equal(filter_mask.numpy(), expected["filter_mask"])
    assert set(metrics) == set(expected["metrics"])
    for name, value in metrics.items():
        scale = 1.0 if "diff" in name or "_k" in name else 0.0  # differences of numbers below 1: near 0 only their size there counts
        assert value == pytest.approx(expected["metrics"][name], rel=rtol, abs=rtol * scale), name


@given(strategies.settings, strategies.batches())
def test_in_float64_everything_is_as_defined(cfg: Any, batch: Any) -> None:
    assert_like_the_definition(cfg, batch, torch.float64, rtol=1e-6)


@given(strategies.settings, strategies.batches(), st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_in_float32_and_in_half_precision_everything_is_as_defined(cfg: Any, batch: Any, dtype: torch.dtype) -> None:
    assert_like_the_definition(cfg, batch, dtype, rtol=1e-5)


LAST_BITS = 1e-15  # torch's exp2 may differ by so much with the place of a number in its array


def never_look(patch: pytest.MonkeyPatch) -> None:
    """Compute as on a device whose numbers cannot be read in between."""
    patch.setattr(room, "answers_at_once", lambda tensor: False)
    patch.setattr(tokens, "answers_at_once", lambda tensor: False)
    patch.setattr(checks, "answers_at_once", lambda tensor: False)


@given(strategies.settings, strategies.batches(hostile_share=False), st.integers(1, 3))
def test_the_way_that_reads_no_number_gives_the_same(cfg: Any, batch: Any, stretch: int) -> None:
    """Devices cannot be asked in between, and stretches may be of any size."""
    arguments = tensors(batch)
    usual = compute_train_infer_correction(cfg, *arguments)
    with pytest.MonkeyPatch.context() as patch:
        never_look(patch)
        patch.setattr(room, "BLOCK", stretch * arguments[0].shape[1])
        other = compute_train_infer_correction(cfg, *arguments)
    at = arguments[0]
    torch.testing.assert_close(usual[0][at], other[0][at], rtol=1e-12, atol=0)
    assert torch.equal(usual[1], other[1])
    assert dict(usual[2]) == pytest.approx(dict(other[2]), rel=1e-9, abs=1e-12)


@given(strategies.settings, strategies.batches(), st.integers(1, 3))
def test_stretches_may_be_of_any_size(cfg: Any, batch: Any, rows: int) -> None:
    arguments = tensors(batch)
    usual = compute_train_infer_correction(cfg, *arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "STRETCH", rows * arguments[0].shape[1])
        other = compute_train_infer_correction(cfg, *arguments)
    torch.testing.assert_close(usual[0][arguments[0]], other[0][arguments[0]], rtol=LAST_BITS, atol=0)
    assert torch.equal(usual[1], other[1])
    assert dict(usual[2]) == pytest.approx(dict(other[2]), rel=1e-9, abs=1e-12)


class NoAnswers(TorchDispatchMode):
    """Refuses every operation for which the program would have to wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::masked_select", "aten::equal"), name
        if name == "aten::repeat_interleave.Tensor":
            assert (kwargs or {}).get("output_size") is not None
        return func(*args, **(kwargs or {}))


@given(strategies.settings, strategies.batches())
def test_on_a_device_nothing_is_waited_for_until_the_metrics_are_looked_at(cfg: Any, batch: Any) -> None:
    arguments = tensors(batch)
    with pytest.MonkeyPatch.context() as patch:
        never_look(patch)
        with NoAnswers():
            _, _, metrics = compute_train_infer_correction(cfg, *arguments)
        assert len(metrics) > 0


@given(strategies.settings, strategies.batches(), st.sampled_from([0.0, 1.0, NAN, -1e10, INF, -INF]))
def test_what_stands_at_masked_positions_never_matters(cfg: Any, batch: Any, filler: float) -> None:
    mask, old, inference = tensors(batch)
    usual = compute_train_infer_correction(cfg, mask, old, inference)
    filled = compute_train_infer_correction(cfg, mask, torch.where(mask, old, filler), torch.where(mask, inference, -filler))
    assert torch.equal(usual[0][mask], filled[0][mask])
    assert torch.equal(usual[1], filled[1])
    assert dict(usual[2]) == pytest.approx(dict(filled[2]), rel=1e-12)


@pytest.mark.parametrize("filler", [1.0, NAN, -1e10, INF, -INF])
def test_in_float32_masked_positions_do_not_move_the_last_digit_of_a_metric(filler: float) -> None:
    mask = torch.tensor([[True, False, True], [False, True, True]])
    old, inference = torch.tensor([[-1.0, 0.0, -2.0], [0.0, -0.5, -1.0]]), torch.tensor([[-1.2, 0.0, -2.0], [0.0, -0.5, -0.2]])
    usual = compute_train_infer_correction(None, mask, old, inference)[2]
    filled = compute_train_infer_correction(None, mask, torch.where(mask, old, filler), torch.where(mask, inference, filler))[2]
    assert dict(filled) == dict(usual)


@given(strategies.settings, strategies.batches())
def test_the_order_of_rows_never_matters_and_filters_only_take_away(cfg: Any, batch: Any) -> None:
    mask, old, inference = tensors(batch)
    is_weight, filter_mask, metrics = compute_train_infer_correction(cfg, mask, old, inference)
    turned = compute_train_infer_correction(cfg, mask.flip(0), old.flip(0), inference.flip(0))
    torch.testing.assert_close(is_weight[mask], turned[0].flip(0)[mask], rtol=LAST_BITS, atol=0)
    assert torch.equal(filter_mask, turned[1].flip(0))
    assert filter_mask[~mask].all()
    _, unfiltered, _ = compute_train_infer_correction(cfg, mask, old, inference, apply_filters=False)
    assert (filter_mask <= unfiltered).all()
    for chosen in cfg["filters"]:
        _, alone, _ = compute_train_infer_correction({"filters": [chosen]}, mask, old, inference)
        assert (filter_mask <= alone).all()


@given(strategies.settings, strategies.batches())
def test_equal_engines_are_left_alone(cfg: Any, batch: Any) -> None:
    mask, old, _ = batch
    old = np.where(np.isfinite(old), old, -3.0)
    chosen = {**cfg, "is_weight": {**cfg["is_weight"], "upper_bound": None}}
    is_weight, filter_mask, metrics = compute_train_infer_correction(chosen, *tensors((mask, old, old)))
    assert (is_weight == 1).all()
    assert filter_mask.all()
    assert metrics.get("actor/train_infer_k3", 0.0) == 0.0


# ---------------------------------------------------------------- by hand


def test_the_four_levels_of_two_segments() -> None:
    old = torch.log(row(0.5, 0.5, 0.9, 0.4, 0.2))
    inference = torch.log(row(0.25, 0.5, 0.1, 0.4, 0.4))
    mask = torch.tensor([[1, 1, 0, 1, 1]])
    for level, expected in {
        "token": [2.0, 1.0, 1.0, 0.5],
        "segment": [math.sqrt(2), math.sqrt(2), math.sqrt(0.5), math.sqrt(0.5)],
        "geometric": [1.0] * 4,
        "sequence": [1.0] * 4,
    }.items():
        assert weights_under_mask(weighted(level), mask, old, inference) == pytest.approx(expected)
    _, _, metrics = compute_train_infer_correction(None, mask, old, inference)
    assert metrics["actor/train_infer_ratio_token_mean@sum"] == pytest.approx(4.5 / 4)
    assert metrics["actor/train_infer_diff_token_mean@sum"] == pytest.approx(0.05 / 4)
    assert metrics["actor/train_infer_diff_sequence_mean@sum"] == pytest.approx(0.05)
    assert metrics["actor/train_infer_k1"] == pytest.approx(0.0, abs=1e-12)
    assert metrics["actor/train_infer_k2"] == pytest.approx(math.log(2) ** 2 / 4)
    assert metrics["actor/train_infer_k3"] == pytest.approx(0.5 / 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("low", "high"), [(0.8, 1.2), (0.5, 2.0), (0.999, 1.001)])
def test_bounds_are_inclusive(dtype: torch.dtype, low: float, high: float) -> None:
    ratios = torch.tensor([[low * 0.999, low, 1.0, high, high * 1.001]], dtype=dtype)
    inference = torch.full_like(ratios, -2.5)
    _, filter_mask, _ = compute_train_infer_correction(
        {"filters": [band("token", low, high)]}, ones(ratios), inference + ratios.log(), inference
    )
    assert filter_mask.tolist() == [[False, True, True, True, False]]
    inference = torch.tensor([[0.25, 0.5, 0.5, 0.75]], dtype=dtype)
    old = torch.tensor([[0.45, 0.3, 0.29, 0.96]], dtype=dtype)
    diff = {"filters": [{**ON, "ratio_enabled": False, "diff_enabled": True}]}
    _, filter_mask, _ = compute_train_infer_correction(diff, ones(old), old.log(), inference.log())
    assert filter_mask.tolist() == [[True, True, False, False]]


def test_of_filters_in_a_row_each_looks_at_the_whole_mask() -> None:
    old, inference = torch.log(row(0.9, 0.5)), torch.log(row(0.3, 0.5))
    first, second = band("token", 0.5, 2.0), band("sequence", 0.5, 2.0)
    _, both, metrics = compute_train_infer_correction({"filters": [first, second]}, ones(old), old, inference)
    assert both.tolist() == [[False, False]]  # without the first token, which the first filter rejects, the row would pass the second
    assert metrics["actor/train_infer_token_ratio_mask_mean@sum"] == 0.5
    assert metrics["actor/train_infer_sequence_ratio_mask_mean@sum"] == 0.0
    assert metrics["actor/train_infer_segment_ratio_mask_mean@sum"] == 1.0
    assert metrics["actor/train_infer_final_mask_mean"] == 0.0


def test_a_mask_of_the_tokens_is_read_without_its_first_column() -> None:
    old, inference = torch.log(row(0.9, 0.5)), torch.log(row(0.3, 0.5))
    for mask in (torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 0]]), torch.tensor([[1, 0]])):
        _, filter_mask, metrics = compute_train_infer_correction({"filters": [band("token", 0.5, 2.0)]}, mask, old, inference)
        assert filter_mask.tolist() == [[False, True]]
        assert metrics.total("tokens") == 1


def test_case_105_a_fractional_mask_is_a_mask() -> None:
    old, inference = row(0.0, 0.0, math.log(4)), row(0.0, 0.0, 0.0)
    for share in (1.0, 0.5, 0.25):
        mask = torch.full((1, 3), share, dtype=torch.float64)
        _, filter_mask, metrics = compute_train_infer_correction({"filters": [band("geometric", high=1.5)]}, mask, old, inference)
        assert metrics["actor/train_infer_ratio_token_mean@sum"] == pytest.approx(2.0)
        assert metrics["actor/train_infer_ratio_geometric_mean@sum"] == pytest.approx(4 ** (1 / 3))
        assert not filter_mask.any()


def test_gradients_flow_through_the_weight_only_when_it_is_not_detached() -> None:
    old = torch.log(torch.tensor([[0.5, 0.6], [0.2, 0.3]])).requires_grad_()
    inference = torch.log(torch.tensor([[0.5, 0.5], [0.4, 0.3]]))
    mask = torch.tensor([[1, 1], [1, 0]])
    for level in naive.LEVELS:
        is_weight, _, _ = compute_train_infer_correction(weighted(level, 5.0), mask, old, inference)
        assert not is_weight.requires_grad
        is_weight, filter_mask, metrics = compute_train_infer_correction(weighted(level, 5.0, detach=False), mask, old, inference)
        assert is_weight.requires_grad
        assert not filter_mask.requires_grad
        (gradient,) = torch.autograd.grad((is_weight * mask).sum(), old)
        assert gradient[mask == 0].eq(0).all()
        assert gradient[mask == 1].ne(0).all()
        assert gradient.isfinite().all()


@given(strategies.batches())
def test_no_gradient_is_ever_infinite_or_no_number(batch: Any) -> None:
    mask, old, inference = tensors(batch)
    for level in naive.LEVELS:
        leaf = old.clone().requires_grad_()
        is_weight, _, _ = compute_train_infer_correction(weighted(level, 2.0, detach=False), mask, leaf, inference)
        (gradient,) = torch.autograd.grad(is_weight.sum(), leaf)
        assert gradient.isfinite().all()


def test_the_gradient_of_a_token_weight_is_the_ratio_below_the_bound_and_zero_above() -> None:
    old = torch.log(torch.tensor([[0.5, 0.9]], dtype=torch.float64)).requires_grad_()
    inference = torch.log(row(0.4, 0.1))
    is_weight, _, _ = compute_train_infer_correction(weighted("token", 2.0, detach=False), ones(inference), old, inference)
    (gradient,) = torch.autograd.grad(is_weight.sum(), old)
    assert gradient.tolist() == [pytest.approx([1.25, 0.0])]


def test_metrics_of_parts_with_common_divisors_add_up_to_those_of_the_whole() -> None:
    random = np.random.default_rng(0)
    old, inference = torch.from_numpy(-random.exponential(size=(6, 9))), torch.from_numpy(-random.exponential(size=(6, 9)))
    mask = torch.from_numpy(random.random((6, 9)) < 0.7)
    cfg = {"filters": [band("token", 0.5, 2.0), band("segment", 0.7, 1.5)], **weighted("token", 1.5)}
    _, _, whole = compute_train_infer_correction(cfg, mask, old, inference)
    rows, tokens = whole.total("rows"), whole.total("tokens")
    parts = [compute_train_infer_correction(cfg, mask[at], old[at], inference[at], rows, tokens)[2] for at in (slice(0, 2), slice(2, 6))]
    for name in whole:
        assert sum(part[name] for part in parts) == pytest.approx(whole[name]), name
    alone = [compute_train_infer_correction(cfg, mask[at], old[at], inference[at])[2] for at in (slice(0, 2), slice(2, 6))]
    assert dict(CorrectionMetrics.merge(alone)) == pytest.approx(dict(whole))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 3)])
def test_without_a_token_there_are_no_means_and_nothing_breaks(shape: tuple[int, int]) -> None:
    empty = torch.zeros(shape)
    is_weight, filter_mask, metrics = compute_train_infer_correction({"filters": [band("token", 0.5, 2.0)]}, empty, empty, empty)
    assert is_weight.shape == filter_mask.shape == shape
    assert filter_mask.all()
    assert not any("mean" in name for name in metrics)
    assert set(metrics.values()) == {0.0}


# ---------------------------------------------------------------- presets


def test_every_preset_says_the_direction_of_its_ratio_and_where_it_is_from() -> None:
    for name, make in PRESETS.items():
        text = make.__doc__ or ""
        assert "p_train / p_inference" in text, name
        assert "Source: " in text, name


RATIOS = (0.2, 1.5, 1e-5), (3.0, 1.5, 1.0), (1.001, 1.0, 1.0), (6.0, 0.9, 0.9)


@pytest.mark.parametrize(
    ("name", "kept", "weights"),
    [
        ("token_tis", [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]], [[0.2, 1.5, 1e-5], [2.0, 1.5, 1], [1.001, 1, 1], [2, 0.9, 0.9]]),
        ("sequence_tis", [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]], [[3e-6] * 3, [2.0] * 3, [1.001] * 3, [2.0] * 3]),
        ("token_mis", [[1, 1, 1], [0, 1, 1], [1, 1, 1], [0, 1, 1]], [[0.2, 1.5, 1e-5], [2.0, 1.5, 1], [1.001, 1, 1], [2, 0.9, 0.9]]),
        ("sequence_mis", [[1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]], [[3e-6] * 3, [2.0] * 3, [1.001] * 3, [2.0] * 3]),
        ("icepop", [[0, 1, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1]], [[0.2, 1.5, 1e-5], [3.0, 1.5, 1], [1.001, 1, 1], [5, 0.9, 0.9]]),
        ("geometric_rejection", [[0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 0, 0]], None),
        ("token_veto", [[0, 0, 0], [1, 1, 1], [1, 1, 1], [1, 1, 1]], None),
        ("diagnostics", [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]], None),
    ],
)
def test_what_a_preset_does(name: str, kept: list[list[int]], weights: list[list[float]] | None) -> None:
    ratios = torch.tensor(RATIOS, dtype=torch.float64)
    inference = torch.full_like(ratios, -3.0)
    is_weight, filter_mask, metrics = compute_train_infer_correction({"presets": [name]}, ones(ratios), inference + ratios.log(), inference)
    assert filter_mask.int().tolist() == kept
    torch.testing.assert_close(is_weight, torch.ones_like(ratios) if weights is None else torch.tensor(weights, dtype=torch.float64))
    assert metrics["actor/train_infer_k3"] > 0


def test_presets_combine_with_each_other_and_with_filters_of_ones_own() -> None:
    ratios = torch.tensor(RATIOS, dtype=torch.float64)
    inference = torch.full_like(ratios, -3.0)
    cfg = TrainInferCorrectionConfig.model_validate(
        {"presets": ["token_tis", "token_veto"], "filters": [band("token", high=5.0)], **weighted("token", 1.25)}
    )
    is_weight, filter_mask, _ = compute_train_infer_correction(cfg, ones(ratios), inference + ratios.log(), inference)
    assert filter_mask.int().tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 1], [0, 1, 1]]
    assert is_weight.max() == 1.25


# ---------------------------------------------------------------- refused


LOG = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("mask", "old", "inference", "message"),
    [
        (ones(LOG), None, LOG, "old_logprobs: expected a tensor, got None - compute the trainer's log-probs"),
        (ones(LOG), LOG, None, "inference_logprobs: expected a tensor, got None - let the engine report the log-prob of every token"),
        (None, LOG, LOG, "response_mask: expected a tensor, got None"),
        (ones(LOG), LOG.numpy(), LOG, "old_logprobs: expected a torch tensor, got ndarray"),
        (ones(LOG), LOG[0], LOG, r"old_logprobs: expected two dimensions, rows and tokens, got shape \(3,\)"),
        (ones(LOG), LOG, LOG[:, :2], r"inference_logprobs: expected the shape of old_logprobs, \(2, 3\), got \(2, 2\) - cut or pad both"),
        (ones(LOG), LOG, LOG.double(), "inference_logprobs: expected the type of old_logprobs, float32, got float64"),
        (ones(LOG), LOG.int(), LOG, "old_logprobs: expected a floating type.*got int32"),
        (ones(LOG), LOG, LOG.int(), "inference_logprobs: expected a floating type.*got int32"),
        (ones(LOG), LOG, LOG.to("meta"), "inference_logprobs: expected it on cpu, as old_logprobs, got meta"),
        (ones(LOG).to("meta"), LOG, LOG, "response_mask: expected it on cpu, as old_logprobs, got meta"),
        (ones(LOG[:, :2]), LOG, LOG, r"response_mask: expected shape \(2, 3\), that of the log-probs, or \(2, 4\), .* got \(2, 2\)"),
        (torch.ones(3, 3), LOG, LOG, r"response_mask: expected shape \(2, 3\).*got \(3, 3\)"),
        (torch.ones(2, 3, dtype=torch.complex64), LOG, LOG, "response_mask: expected a mask of true and false, got complex64"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(mask: Any, old: Any, inference: Any, message: str) -> None:
    with pytest.raises(CorrectionError, match=message):
        compute_train_infer_correction(None, mask, old, inference)


# ---------------------------------------------------------------- cases from public reports


def test_case_99_a_rejected_sequence_contributes_nothing_and_no_weight_overflows() -> None:
    old = torch.tensor([[-0.5, 1.0], [200.0, 200.0]]).requires_grad_()
    inference = torch.zeros(2, 2)
    cfg = {"filters": [band("geometric", 0.5, 2.0)], **weighted("token", 2.0, detach=False)}
    is_weight, filter_mask, metrics = compute_train_infer_correction(cfg, torch.ones(2, 2), old, inference)
    assert metrics["actor/train_infer_ratio_geometric_mean@sum"] == pytest.approx((math.exp(0.25) + math.exp(20)) / 2, rel=1e-6)
    assert filter_mask.tolist() == [[True, True], [False, False]]
    assert is_weight.tolist()[0] == pytest.approx([0.6065, 2.0], abs=1e-4)
    loss = (is_weight * filter_mask).sum()
    (gradient,) = torch.autograd.grad(loss, old)
    assert loss.item() == pytest.approx(2.6065, abs=1e-4)
    assert gradient.isfinite().all()
    assert gradient[1].tolist() == [0.0, 0.0]


def test_case_101_everything_rejected_is_a_mask_of_zeros_and_no_crash() -> None:
    inference = torch.full((2, 3), -1.0, dtype=torch.float64)
    _, filter_mask, metrics = compute_train_infer_correction(
        {"filters": [band("geometric", 0.99, 1.001)]}, ones(inference), inference + math.log(1.01), inference
    )
    assert not filter_mask.any()
    assert metrics["actor/train_infer_final_mask_mean"] == 0.0  # masked fraction 1
    assert metrics["actor/train_infer_rejected_rows"] == 2
    assert metrics["actor/train_infer_ratio_geometric_mean@sum"] == pytest.approx(1.01)


def test_case_103_padding_never_enters_exp() -> None:
    _, _, metrics = compute_train_infer_correction(None, torch.tensor([[1, 0]]), row(-1.0, -1e10), row(-1.0, 0.0))
    assert metrics["actor/train_infer_ratio_token_mean@sum"] == 1.0
    assert metrics["actor/train_infer_k3"] == 0.0
    assert metrics["actor/train_infer_clamped"] == 0


def test_case_107_what_lies_above_the_bound_is_counted_before_clamping() -> None:
    ratios = torch.tensor([[3.0, 5.0], [1.0, 1.0]], dtype=torch.float64)
    inference = torch.full_like(ratios, -2.0)
    _, _, metrics = compute_train_infer_correction(weighted("token", 2.0), ones(ratios), inference + ratios.log(), inference)
    assert metrics["actor/is_weight_clipfrac@sum"] == 0.5
    _, _, metrics = compute_train_infer_correction(None, ones(row(0.0)), row(0.0), row(-25.0))
    assert metrics["actor/train_infer_k1"] == -25.0
    assert metrics["actor/train_infer_k2"] == 312.5
    assert metrics["actor/train_infer_clamped"] == 1


def test_case_109_fillers_of_masked_tokens_are_never_read() -> None:
    mask = torch.tensor([[1, 0, 1]])
    found = []
    for filler in (0.0, 1.0, NAN, -1e10):
        cfg = {"filters": [band("token", 0.5, 2.0)], **weighted("sequence", 2.0)}
        is_weight, filter_mask, metrics = compute_train_infer_correction(cfg, mask, row(-1.0, filler, -2.0), row(-1.5, filler, -2.0))
        found.append((is_weight[mask.bool()].tolist(), filter_mask.tolist(), dict(metrics)))
    assert all(one == found[0] for one in found)


def test_case_111_an_appended_end_token_has_no_part_in_the_ratio() -> None:
    """Four tokens were sampled; the fifth was added and has a placeholder for a log-prob."""
    old, inference = row(-1.0, -2.0, -0.5, -1.0, -3.0), row(-1.0, -2.0, -0.5, -1.0, 0.0)
    _, _, metrics = compute_train_infer_correction(None, torch.tensor([[1, 1, 1, 1, 0]]), old, inference)
    assert metrics.total("tokens") == 4
    assert metrics["actor/train_infer_ratio_sequence_mean@sum"] == 1.0


def test_case_113_a_token_without_a_number_counts_as_equal_and_is_counted() -> None:
    for cfg in (None, {"presets": ["icepop"]}, weighted("token")):
        is_weight, filter_mask, metrics = compute_train_infer_correction(cfg, ones(row(0, 0)), row(-0.1, -1.0), row(NAN, -1.0))
        assert is_weight.tolist() == [[1.0, 1.0]]
        assert filter_mask.all()
        assert metrics["actor/train_infer_nan_tokens"] == 1
        assert metrics["actor/train_infer_ratio_token_mean@sum"] == 1.0
    with pytest.raises(CorrectionError, match="inference_logprobs: expected a tensor, got None"):
        compute_train_infer_correction({"presets": ["icepop"]}, ones(row(0, 0)), row(-0.1, -1.0), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "inference"), [(NAN, -1.0), (-INF, -1.0), (INF, -1.0), (-1.0, -INF), (-1.0, INF), (-INF, -INF), (NAN, NAN)]
)
def test_a_row_with_a_log_prob_that_cannot_be_is_rejected_and_counted(old: float, inference: float) -> None:
    mask = torch.ones(2, 2)
    bad = torch.tensor([[old, -1.0], [-1.0, -1.0]]), torch.tensor([[inference, -1.0], [-1.0, -1.0]])
    for cfg in (None, {"filters": [band("segment", 0.5, 2.0)]}, weighted("sequence")):
        is_weight, filter_mask, metrics = compute_train_infer_correction(cfg, mask, *bad)
        assert is_weight.isfinite().all()
        assert filter_mask.tolist() == [[False, False], [True, True]]
        assert metrics["actor/train_infer_non_finite"] == 1
        assert all(math.isfinite(value) for value in metrics.values())


def test_case_115_the_anchor_is_the_policy_at_the_start_of_the_step() -> None:
    """Weight = exp(old - inference), the ratio of PPO = exp(current - old)."""
    old, inference, current = row(-1.0), row(-1.1), row(-0.5)
    (weight,) = weights_under_mask(weighted(), ones(old), old, inference)
    assert weight == pytest.approx(1.1052, abs=1e-4)
    assert (current - old).exp().item() == pytest.approx(1.6487, abs=1e-4)


def test_case_117_a_sequence_is_rejected_by_one_decision() -> None:
    """Tokens with an advantage of the right sign do not stay behind."""
    current, old = row(0.0, 0.0, 0.0), row(1.0, 1.0, 1.0)
    cfg = {"filters": [band("sequence", math.exp(-0.1), math.exp(0.1))]}
    _, filter_mask, _ = compute_train_infer_correction(cfg, ones(old), current, old)
    assert filter_mask.int().tolist() == [[0, 0, 0]]


def test_case_119_rows_of_unequal_length_are_refused_and_a_shift_shows() -> None:
    p = torch.log(row(0.9, 0.1, 0.5, 0.8))
    assert weights_under_mask(weighted(), ones(p), p, p) == [1.0] * 4
    with pytest.raises(CorrectionError, match=r"expected the shape of old_logprobs, \(1, 4\), got \(1, 3\)"):
        compute_train_infer_correction(None, ones(p), p, p[:, 1:])
    assert weights_under_mask(weighted(), ones(p[:, 1:]), p[:, 1:], p[:, :-1]) == pytest.approx([1 / 9, 5.0, 1.6])
    _, _, metrics = compute_train_infer_correction(None, ones(p[:, 1:]), p[:, 1:], p[:, :-1])
    assert metrics["actor/train_infer_k2"] > 1.0


def test_case_121_a_threshold_has_an_effect_and_none_has_none() -> None:
    old, inference = torch.tensor([[0.0, -1.0], [0.0, -1.0]]), torch.tensor([[-3.0, -4.0], [0.0, -1.0]])
    for threshold, sample_mask in ((2.0, [0, 1]), (None, [1, 1])):
        cfg = {"filters": [band("geometric", 0.0, threshold)]}
        _, filter_mask, _ = compute_train_infer_correction(cfg, ones(old), old, inference)
        assert filter_mask.all(1).int().tolist() == sample_mask


def test_case_57_a_rejected_sibling_is_rejected_whole() -> None:
    old = torch.log(torch.tensor([[0.368], [1.649]]))
    _, filter_mask, metrics = compute_train_infer_correction({"filters": [band("sequence", 0.5, 2.0)]}, ones(old), old, torch.zeros(2, 1))
    assert filter_mask.tolist() == [[False], [True]]
    assert metrics["actor/train_infer_rejected_rows"] == 1


def test_wrong_settings_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"filters.0.agg_type: expected one of token, segment, geometric, sequence, got 'tokens'.*did you mean token"
    ):
        compute_train_infer_correction({"filters": [{"enabled": True, "agg_type": "tokens"}]}, ones(LOG), LOG, LOG)
