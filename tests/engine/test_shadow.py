"""The exchange of layers: all or nothing, and undone by a second one. On plain modules, without vLLM."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from eaglenest.engine import shadow as module
from eaglenest.engine.shadow import Part, Shadow, _swap_contents, _swap_storage


def layer(value: float, handle: str) -> nn.Module:
    made = nn.Linear(2, 2, bias=False)
    nn.init.constant_(made.weight, value)
    made.__dict__["cpu_linear"] = handle
    return made


@pytest.fixture
def shadow() -> Shadow:
    """Two parts, live ones at 1 and 2, staged ones at 10 and 20."""
    made = object.__new__(Shadow)
    made.parts = {
        name: Part(name, layer(i, f"live {name}"), layer(10 * i, f"staged {name}"), attributes=["cpu_linear"])
        for i, name in enumerate(("a", "b"), start=1)
    }
    made.exchanged = False
    return made


def state(shadow: Shadow, side: str) -> list[tuple[float, str]]:
    parts = [getattr(part, side) for part in shadow.parts.values()]
    return [(float(part.weight[0, 0]), part.__dict__["cpu_linear"]) for part in parts]


BEFORE = [(1.0, "live a"), (2.0, "live b")]
AFTER = [(10.0, "staged a"), (20.0, "staged b")]


def test_an_exchange_swaps_tensors_and_handles_and_a_second_one_undoes_it(shadow: Shadow) -> None:
    shadow.exchange()
    assert (state(shadow, "live"), state(shadow, "shadow"), shadow.exchanged) == (AFTER, BEFORE, True)
    shadow.exchange()
    assert (state(shadow, "live"), state(shadow, "shadow"), shadow.exchanged) == (BEFORE, AFTER, False)


def test_a_fault_between_layers_undoes_what_was_exchanged(shadow: Shadow) -> None:
    def fail(path: str) -> None:
        if path == "b":
            raise MemoryError

    with pytest.raises(MemoryError):
        shadow.exchange(fail)
    assert (state(shadow, "live"), shadow.exchanged) == (BEFORE, False)


def test_a_fault_inside_a_layer_undoes_its_first_half(shadow: Shadow) -> None:
    del shadow.parts["b"].shadow.__dict__["cpu_linear"]  # its weight is exchanged before this is found
    with pytest.raises(KeyError):
        shadow.exchange()
    assert state(shadow, "live") == BEFORE


@pytest.mark.parametrize(("swap", "same_address"), [(_swap_storage, False), (_swap_contents, True)])
def test_on_a_gpu_the_live_tensors_keep_their_addresses(
    swap: Callable[[torch.Tensor, torch.Tensor], None], same_address: bool
) -> None:
    a, b = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.zeros(3), requires_grad=False)
    address = a.data_ptr()
    swap(a, b)
    assert (a.sum(), b.sum()) == (0, 3)
    assert (a.data_ptr() == address) is same_address


def test_a_plain_tensor_is_told_apart_by_its_digest() -> None:
    tensor = torch.arange(4.0)
    assert module._digest(tensor) == module._digest(tensor.clone())
    assert module._digest(tensor) != module._digest(tensor + 1e-6)
