"""The pool's layouts: which tensors stand where, what they take, and that layers are kept apart."""

from __future__ import annotations

import pytest
import torch

from dovetail.cache.pool import KVCache, PagedKVPool
from dovetail.contracts.cache import CacheTensor, Window
from dovetail.contracts.config import LayerSpec, cache_groups, dense_layers
from dovetail.runtime.memory.estimates import group_token_bytes

CPU = torch.device("cpu")
PAGES, PAGE = 5, 4


def cache(*specs: LayerSpec) -> KVCache:
    """A cache of a few pages."""
    groups = cache_groups(specs)
    return KVCache(groups, [PAGES] * len(groups), PAGE, torch.float32, CPU)


def layer(index: int, **facts: object) -> LayerSpec:
    """Two KV heads, 8 wide, unless said otherwise."""
    return LayerSpec(**{"index": index, "num_qo_heads": 4, "num_kv_heads": 2, "qk_dim": 8, "v_dim": 8, **facts})


def test_keys_and_values_of_one_width_stand_together() -> None:
    """The layout that kernels read is as it always was, with further tensors beside it; views see what is written."""
    plain = cache(layer(0), layer(1))
    assert plain.layer(1).shape == (PAGES, 2, PAGE, 2, 8)
    assert plain.layer(1).is_contiguous()
    plain.layer(1)[3, 1, 2] = 7.0
    assert bool((plain.tensor(1, "v")[3, 2] == 7.0).all())
    assert plain.tensor(1, "k").count_nonzero() == plain.tensor(0, "v").count_nonzero() == 0
    indexed = cache(layer(0, extra=(CacheTensor("index", (6,), "float8_e4m3fn"),)))
    assert indexed.layer(0).shape == (PAGES, 2, PAGE, 2, 8)
    index = indexed.tensor(0, "index")
    assert (index.shape, index.dtype) == ((PAGES, PAGE, 6), torch.float8_e4m3fn)


def test_a_latent_row_is_key_and_value() -> None:
    """Both are views of one row, which is all that is stored."""
    pool = cache(layer(0, mixer="latent", num_kv_heads=1, qk_dim=10, v_dim=8))
    pool.tensor(0, "k")[2, 1, 0] = torch.arange(10.0)
    assert pool.tensor(0, "latent")[2, 1].tolist() == list(range(10))
    assert pool.tensor(0, "v")[2, 1].tolist() == [list(range(8))]
    assert pool.num_bytes == PAGES * PAGE * 10 * 4
    with pytest.raises(KeyError):
        pool.layer(0)


def test_widths_may_differ() -> None:
    """Each tensor has its own, and no more memory than that."""
    pool = cache(layer(0, v_dim=12))
    assert pool.tensor(0, "k").shape == (PAGES, PAGE, 2, 8)
    assert pool.tensor(0, "v").shape == (PAGES, PAGE, 2, 12)
    assert pool.num_bytes == PAGES * PAGE * 2 * 20 * 4


def test_a_layer_without_a_cache_reads_another_ones() -> None:
    """It takes no memory; of several groups it belongs to that of its source."""
    specs = (layer(0), layer(1, reach=Window(8)), layer(2, cache_layer=0), layer(3, reach=Window(8), cache_layer=1))
    shared, own = cache(*specs), cache(*specs[:2])
    assert shared.num_bytes == own.num_bytes
    for reader, source in ((2, 0), (3, 1)):
        assert shared.layer(reader).data_ptr() == shared.layer(source).data_ptr()
        assert shared.tensor(reader, "v").data_ptr() == shared.tensor(source, "v").data_ptr()
    assert [group_token_bytes(group, 4) for group in cache_groups(specs)] == [2 * 2 * 8 * 4] * 2


@pytest.mark.parametrize(
    "changes",
    [{}, {"v_dim": 12}, {"mixer": "latent", "num_kv_heads": 1}, {"extra": (CacheTensor("index", (3,), "int8"),)}],
    ids=str,
)
def test_the_plan_counts_what_the_pool_takes(changes: dict[str, object]) -> None:
    """Bytes per token, whatever the layout; and scrubbing zeroes every tensor of a page."""
    specs = [layer(0, **changes), layer(1, **changes), layer(2, cache_layer=1, **{**changes, "extra": ()})]
    (group,) = cache_groups(specs)
    pool = PagedKVPool(group, PAGES, PAGE, torch.bfloat16, CPU)
    assert pool.num_bytes == PAGES * PAGE * group_token_bytes(group, 2)
    for tensor in group.tensors:
        pool.tensor(1, tensor.name).fill_(3)
    pool.zero_pages([2, 4])
    for tensor in group.tensors:
        assert [bool(page.any()) for page in pool.tensor(1, tensor.name)] == [True, True, False, True, False]


def test_plain_layers_are_as_before() -> None:
    """What a dense model's pool holds is one tensor."""
    (group,) = cache_groups(dense_layers(3, num_qo_heads=2, num_kv_heads=2, head_dim=16))
    pool = PagedKVPool(group, PAGES, PAGE, torch.float32, CPU)
    assert [pool.layer(i).data_ptr() - pool.layer(0).data_ptr() for i in range(3)] == [
        i * PAGES * 2 * PAGE * 2 * 16 * 4 for i in range(3)
    ]
