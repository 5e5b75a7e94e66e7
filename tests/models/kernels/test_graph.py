"""The Triton kernels of SGR's graphs against plain torch: on a GPU, or on a CPU with TRITON_INTERPRET=1."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from kernel_marks import CUDA, HALF, cases, interpreted, needs_gpu, on_device, on_gpu_only, slow_on_cpu
from mispair.config import Config
from mispair.models import SideSpec, build
from mispair.models.kernels import graph
from mispair.models.kernels.common import MOST_ROWS
from mispair.models.ragged import packing
from mispair.models.sgraf import SGR

NAMES = ["Y", "queries", "nodes"]
SIZES = [  # images, s, words of each caption, rows of words that belong to no caption
    (1, 16, [1], 0),
    (1, 24, [5], 3),
    (3, 16, [1, 15, 2], 0),
    (2, 24, [16, 1, 31, 14], 5),
    (2, 256, [3, 32, 12, 15], 1),
    (1, 256, [63, 1, 30], 0),
    (2, 24, [63, 33, 16, 8, 0], 70),
    (2, 200, [47, 15], 0),
]
LARGE = [  # for half precision
    (1, 256, [127, 64, 1, 63], 0),
    (2, 24, [65, 16, 63, 31, 64, 90, 0], 70),
    (1, 16, [64], 3),
    (2, 200, [15, 111], 0),
]
Sizes = tuple[int, int, list[int], int]
Attend = Callable[..., Tensor]
ours = pytest.mark.parametrize("attend", [graph.attend, graph.attend_first])


def problem(images: int, s: int, words: list[int], spare: int, sharp: float = 2.0) -> tuple[list[Tensor], Tensor]:
    """Queries, nodes and the gradient of the result; and the lengths."""
    rows = len(words) + sum(words) + spare
    nodes = torch.randn(images, rows, s)
    queries = sharp * torch.randn(images, rows, s) / s**0.5
    return [queries, nodes, torch.randn(images, rows, s)], torch.tensor(words)


def plain(queries: Tensor, nodes: Tensor, starts: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """A loop over images and captions. Asks for whole captions only if that is what there are queries for."""
    assert longest > int(lengths.max())
    assert torch.equal(starts, lengths.cumsum(0) - lengths)
    result = torch.zeros_like(queries)
    for image, rows in graphs(len(nodes), lengths):
        asking = rows if queries.shape == nodes.shape else rows[:1]
        X = nodes[image, rows]
        edges = (queries[image, asking] @ X.T).softmax(dim=-1)
        result[image, asking] = edges @ X
    return result


def graphs(images: int, lengths: Tensor) -> Iterator[tuple[int, list[int]]]:
    """Image and rows of each graph."""
    for image in range(images):
        start = len(lengths)
        for caption, length in enumerate(lengths.tolist()):
            yield image, [caption, *range(start, start + length)]
            start += length


def terms(first: bool, parts: list[Tensor], lengths: Tensor) -> list[Tensor]:
    """Sizes of all that is added up to the gradients of queries and nodes: without the signs, nothing cancels."""
    queries, nodes, gradient = (part.double() for part in parts)
    to_queries, to_nodes = torch.zeros_like(queries), torch.zeros_like(nodes)
    for image, rows in graphs(len(nodes), lengths):
        asking = rows[:1] if first else rows
        Z, X, G = queries[image, asking], nodes[image, rows], gradient[image, asking].abs()
        P = (Z @ X.T).softmax(dim=-1)
        to_P = G @ X.abs().T
        to_scores = P * (to_P + (P * to_P).sum(dim=-1, keepdim=True))
        to_queries[image, asking] = to_scores @ X.abs()
        to_nodes[image, rows] = to_scores.T @ Z.abs() + P.T @ G
    return [to_queries, to_nodes]


def outcome(
    attend: Attend,
    first: bool,
    parts: list[Tensor],
    lengths: Tensor,
    device: str | torch.device,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Y and the gradients of queries and nodes, in float64."""
    queries, nodes, factors = (part.to(device, dtype, copy=True) for part in parts)
    if first:
        queries, factors = queries[:, : len(lengths)].clone(), factors[:, : len(lengths)]
    leaves = [queries.requires_grad_(), nodes.requires_grad_()]
    lengths = lengths.to(device)
    Y = attend(*leaves, lengths.cumsum(0) - lengths, lengths, 1 + int(lengths.max()))
    assert Y.dtype == dtype
    found = Y, *torch.autograd.grad((Y * factors).sum(), leaves)
    return [part.detach().double().cpu() for part in found]


def compare(attend: Attend, device: str, parts: list[Tensor], lengths: Tensor) -> dict[str, float]:
    """Errors of a kernel in float32."""
    first = attend is graph.attend_first
    expected = outcome(plain, first, parts, lengths, "cpu", torch.float64)
    return errors(outcome(attend, first, parts, lengths, device), expected)


def errors(found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """Length of the error, relative to what is expected."""
    named = zip(NAMES, found, expected, strict=True)
    return {name: float((value - right).norm() / right.norm().clamp(min=1e-9)) for name, value, right in named}


@ours
@cases("sizes", [(sizes,) for sizes in SIZES if sizes != SIZES[4]], [(SIZES[6],)], slow_on_cpu=[(SIZES[4],)])
def test_result_and_gradients_equal_the_loop(attend: Attend, device: str, sizes: Sizes) -> None:
    found = compare(attend, device, *problem(*sizes))
    assert all(value < 1e-5 for value in found.values()), found


@ours
@cases("sizes", [(LARGE[2],)], [], slow_on_cpu=[(LARGE[0],), (LARGE[1],), (LARGE[3],)])
def test_large_graphs_equal_the_loop(
    attend: Attend, device: str, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, for which a GPU has too few registers: half precision would hide small mistakes."""
    monkeypatch.setitem(MOST_ROWS, torch.float32, 128)
    found = compare(attend, device, *problem(*sizes))
    assert all(value < 1e-5 for value in found.values()), found


@ours
@cases(
    "sizes, alike",
    [(SIZES[3], 5.0)],
    [(SIZES[5], 5.0), (LARGE[0], 5.0), (LARGE[1], 0.0)],
    slow_on_cpu=[(sizes, alike) for sizes in SIZES + LARGE for alike in (0.0, 5.0)],
)
def test_half_precision_is_as_near_as_plain_torch(attend: Attend, device: str, sizes: Sizes, alike: float) -> None:
    """After a ReLU nodes are `alike`, they have much in common, and gradients cancel."""
    parts, lengths = problem(*sizes)
    half = HALF[device]
    parts[1] = (parts[1] + alike * torch.rand(sizes[1])) / (1 + alike)
    parts = [part.to(half).float() for part in parts]
    first = attend is graph.attend_first
    expected = outcome(plain, first, parts, lengths, "cpu", torch.float64)
    found = errors(outcome(attend, first, parts, lengths, device, half), expected)
    usual = errors(outcome(plain, first, parts, lengths, device, half), expected)
    assert all(found[name] < 1.5 * usual[name] + 2e-3 for name in NAMES), (found, usual)


@ours
@interpreted
@pytest.mark.parametrize(("sharp", "error"), [(1e-3, 1e-5), (100.0, 1e-3)])  # large scores lose digits in any order
def test_flat_and_sharp_weights(attend: Attend, sharp: float, error: float) -> None:
    found = compare(attend, "cpu", *problem(2, 24, [3, 20, 40], 2, sharp))
    assert all(value < error for value in found.values()), found


@ours
@on_device
def test_large_scores_do_not_overflow(attend: Attend, device: str) -> None:
    """Each node sees a single other one, so that the scores have no gradient: all that adds up to it cancels.

    What remains is rounding, which large queries carry into the gradient of the nodes. Relative to all that is added,
    it is less than what float32 rounds off one number; with a part left out, the gradients are further off than that.
    """
    parts, lengths = problem(2, 24, [3, 20, 40], 2, 1e6)
    first = attend is graph.attend_first
    Y, *gradients = outcome(attend, first, parts, lengths, device)
    right, *expected = outcome(plain, first, parts, lengths, "cpu", torch.float64)
    assert (Y - right).norm() < 1e-6 * right.norm()
    for gradient, exact, added in zip(gradients, expected, terms(first, parts, lengths), strict=True):
        error = (gradient - exact).norm() / added.norm()
        assert error < 2**-24, float(error)


@ours
@interpreted
@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_scores_all_low_or_all_high(attend: Attend, offset: float) -> None:
    parts, lengths = problem(1, 16, [1, 14, 40], 0)
    queries, nodes, _ = parts
    nodes[..., 0] = 1.0
    queries[..., 0] = offset  # adds the same to all scores, which the softmax does not see
    found = compare(attend, "cpu", parts, lengths)
    assert all(value < 3e-3 for value in found.values()), found  # the scores themselves have an error of 3e4 * 2^-24


@ours
@on_device
def test_rows_of_no_caption_are_zero(attend: Attend, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda like, **as_: torch.full_like(like, torch.nan, **as_))
    parts, lengths = problem(2, 24, [3, 40], 40)  # more than all programs clear at once
    first = attend is graph.attend_first
    clean = outcome(attend, first, parts, lengths, device)
    for part in parts:
        part[:, -40:] = 1e30
    Y, to_queries, to_nodes = junk = outcome(attend, first, parts, lengths, device)
    spare = [to_nodes] if first else [Y, to_queries, to_nodes]
    assert all((part[:, -40:] == 0).all() for part in spare)
    assert all(torch.equal(one, other) for one, other in zip(clean, junk, strict=True))


@ours
@on_gpu_only
def test_the_same_bits_every_time(attend: Attend, device: str) -> None:
    parts, lengths = problem(*((3, 24, [3, 20, 40, 14, 70], 2) if device == "cuda" else (1, 24, [3, 20, 70], 2)))
    first = attend is graph.attend_first
    one, two = (outcome(attend, first, parts, lengths, device, HALF[device]) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@ours
@on_device
def test_longest_is_a_bound_only(attend: Attend, device: str) -> None:
    parts, lengths = problem(1, 24, [3, 10, 14], 2)
    queries, nodes, _ = (part.to(device) for part in parts)
    if attend is graph.attend_first:
        queries = queries[:, :3]
    lengths = lengths.to(device)
    starts = lengths.cumsum(0) - lengths
    tight, *loose = (attend(queries, nodes, starts, lengths, longest) for longest in (15, 16, 17, 64))
    assert all(torch.equal(tight, other) for other in loose)
    half = queries.to(HALF[device]), nodes.to(HALF[device])
    assert torch.equal(attend(*half, starts, lengths, 64), attend(*half, starts, lengths, 128))


@ours
@interpreted
def test_strides_and_kinds_of_integers(attend: Attend) -> None:
    (queries, nodes, _), lengths = problem(2, 24, [3, 20], 0)
    if attend is graph.attend_first:
        queries = queries[:, :2]  # as it is cut out of all queries
    starts = lengths.cumsum(0) - lengths
    straight = attend(queries.contiguous(), nodes, starts, lengths, 21)
    turned = nodes.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(queries, turned, starts.int(), lengths.int(), 21), straight)
    assert torch.equal(attend(queries.double(), nodes, starts, lengths, 21), straight)


@ours
@cases("needed", [(0,), (1,)], [(1,)])
def test_gradient_of_one_input_only(attend: Attend, device: str, needed: int) -> None:
    parts, lengths = problem(1, 24, [3, 20], 2)
    first = attend is graph.attend_first
    expected = outcome(attend, first, parts, lengths, device)
    queries, nodes, factors = (part.to(device) for part in parts)
    if first:
        queries, factors = queries[:, :2], factors[:, :2]
    inputs = [queries, nodes]
    inputs[needed].requires_grad_()
    lengths = lengths.to(device)
    Y = attend(*inputs, lengths.cumsum(0) - lengths, lengths, 21)
    (found,) = torch.autograd.grad((Y * factors).sum(), inputs[needed])
    assert torch.equal(found.double().cpu(), expected[1 + needed])


@slow_on_cpu
def test_one_launch_for_each_size(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORWARD", "BACKWARD"):
        launch, _ = getattr(graph, name)
        monkeypatch.setattr(graph, name, [{**launch, "LEAST": rows, "MOST": rows} for rows in (16, 32, 64, 128)])
    if device == "cpu":
        monkeypatch.setitem(MOST_ROWS, torch.float32, 128)
    for sizes in (SIZES[2], SIZES[6], LARGE[1]) if device == "cpu" else SIZES[6:7]:
        found = compare(graph.attend, device, *problem(*sizes))
        assert all(value < 1e-5 for value in found.values()), found


@pytest.mark.parametrize(("count", "dtype"), [(65, torch.float32), (129, torch.bfloat16)])
def test_larger_graphs_are_refused(count: int, dtype: torch.dtype) -> None:
    nodes, lengths = torch.zeros(1, count, 16, dtype=dtype), torch.tensor([count - 1])
    with pytest.raises(ValueError, match=f"{count} nodes"):
        graph.attend(nodes, nodes, torch.zeros_like(lengths), lengths, count)


def test_larger_graphs_are_left_to_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "available", lambda _: True)
    spec = SideSpec("regions", 4, 2), SideSpec("tokens", 9)
    network = build(Config(model="sgr", embed_size=8, word_size=4), *spec, seed=0)
    assert isinstance(network, SGR)
    assert network._fused(packing(torch.tensor([63, 3]), 63, torch.device("cpu")))
    assert not network._fused(packing(torch.tensor([64, 3]), 64, torch.device("cpu")))


def test_a_cpu_does_without() -> None:
    assert not graph.available(torch.device("cpu"))


def test_what_does_not_fit() -> None:
    def fits(s: int, longest: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return graph.fits(s, dtype, longest)

    assert fits(256, 128)
    assert fits(256, 128, torch.float16)
    assert fits(256, 64, torch.float32)
    assert fits(1, 1, torch.float32)
    assert not fits(257, 64)
    assert not fits(256, 129)
    assert not fits(256, 65, torch.float32)
    assert not fits(256, 64, torch.float64)


@pytest.mark.gpu
@needs_gpu
@ours
@pytest.mark.parametrize("half", [False, True])
def test_the_real_size_on_a_gpu(attend: Attend, half: bool) -> None:
    assert graph.available(CUDA)
    words = (3 + 12 * torch.rand(40) ** 2 * 4).int().tolist()
    parts, lengths = problem(16, 256, [*words, 60, *([127, 64, 80] if half else [])], 48)
    dtype = torch.bfloat16 if half else torch.float32
    parts = [part.to(dtype).float() for part in parts]
    first = attend is graph.attend_first
    expected = outcome(plain, first, parts, lengths, CUDA, torch.float64)
    found = errors(outcome(attend, first, parts, lengths, CUDA, dtype), expected)
    usual = errors(outcome(plain, first, parts, lengths, CUDA, dtype), expected)
    assert all(found[name] < 1.5 * usual[name] + (2e-3 if half else 1e-5) for name in NAMES), (found, usual)


@pytest.mark.gpu
@needs_gpu
@ours
@pytest.mark.parametrize(("dtype", "longest", "other"), [(torch.float32, 64, 50), (torch.bfloat16, 128, 80)])
def test_a_cuda_graph_takes_other_captions(attend: Attend, dtype: torch.dtype, longest: int, other: int) -> None:
    def inputs(words: list[int]) -> list[Tensor]:
        parts, lengths = problem(4, 24, words, 100 - sum(words))
        queries, nodes, _ = (part.to(dtype) for part in parts)
        if attend is graph.attend_first:
            queries = queries[:, : len(words)]
        return [part.to(CUDA, copy=True) for part in (queries, nodes, lengths.cumsum(0) - lengths, lengths)]

    first, second = inputs([3, 20, 40]), inputs([other, 1, 16])
    attend(*first, longest)  # compiles
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        Y = attend(*first, longest)
    for old, new in zip(first, second, strict=True):
        old.copy_(new)
    captured.replay()
    assert torch.equal(Y, attend(*second, longest))
