"""What a layer is asked about caches: an empty one, and what a call with one attends to."""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.cache import KVCache
from multihead.cache_ledger import Step
from multihead.cache_pages import PagePool
from multihead.errors import bad_type, bad_value, check_size
from multihead.options import Positions


class CacheCalls:
    """The part of a layer that needs none of its parameters."""

    def cache_step(
        self,
        cache: object,
        batch: tuple[int, ...],
        lengths: tuple[int, int | None],
        device: torch.device,
        positions: Positions | None,
        keep: Tensor | None,
    ) -> Step:
        """What a call with a cache attends to, before anything is computed.

        Args:
            cache: a `KVCache`.
            batch: the batch axes of the call.
            lengths: tokens of query, and of key; None where a frozen cache stands for key and value.
            device: of the call.
            positions, keep: as of the call.

        Raises:
            ValueError, TypeError: the call does not fit the cache.
        """
        if not isinstance(cache, KVCache):
            raise bad_type("cache", "a KVCache or None", cache)
        if positions is not None and not isinstance(positions, Tensor):
            instead = "The cache knows where its keys stand."
            raise bad_type("positions", "with a cache a tensor (L,) or (*batch, L)", positions, "", instead)
        L, given = lengths
        if cache.frozen:
            if given is not None or keep is not None:
                got = "key and value" if given is not None else "keep"
                raise bad_value(
                    "cache", "the queries alone beside a context's cache", got, "It is the keys and values."
                )
            return cache.look(batch, L, device, positions)
        if given != L:
            expected, got = f"as many keys as queries beside a cache, L={L}", f"S={given}"
            instead = "For the keys of an encoder's output make one with context_cache()."
            raise bad_value("key", expected, got, "", instead)
        return cache.prepare(batch, L, device, positions=positions, keep=keep)

    def new_cache(
        self,
        batch: int | None = None,
        capacity: int | None = None,
        *,
        storage: str | None = None,
        pool: PagePool | None = None,
        dtype: torch.dtype | None = None,
    ) -> KVCache:
        """An empty cache for this layer's keys and values: `KVCache`, with "fixed" where a capacity is given alone.

        Args:
            batch: rows that the first tokens must have; None for any.
            capacity, storage, pool, dtype: as of `KVCache`.
        """
        kind = storage or ("paged" if pool is not None else "growing" if capacity is None else "fixed")
        cache = KVCache(kind, capacity=capacity, pool=pool, dtype=dtype)
        return cache if batch is None else cache.expect((check_size("batch", batch),))
