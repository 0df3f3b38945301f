"""`KVCache`: the keys and values of tokens that were seen before, with the positions at which they stand.

A layer that is called with a cache adds its new keys and values to it and attends to all that it holds:

    cache = KVCache()
    for chunk in x.split(16, dim=1):
        out = attn(chunk, cache=cache)

Because it holds positions, everything that follows positions (causal, windows, rotary, ALiBi) means in a chunk what it
means in the whole: decoding has no rule of its own. Which tokens a row has is in `cache_ledger.py`, how their numbers
lie in memory in `cache_storage.py` and `cache_pages.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from multihead.cache_format import Format, Stored
from multihead.cache_ledger import Ledger, Step, check_counts, check_keep, check_places, check_rows
from multihead.cache_pages import PagePool, Pages
from multihead.cache_state import from_state, to_state
from multihead.cache_storage import Place, Rows, Storage, check_tokens
from multihead.errors import bad_type, bad_value, check_size, describe
from multihead.masks import window

_KINDS = ("growing", "fixed", "ring", "paged")
_SPARE = 64  # tokens that a ring keeps beyond its window, so that so many can be cropped again


class KVCache:
    """Keys, values and positions of a layer's tokens.

    Args:
        storage: "growing" takes any number of tokens; "fixed" up to `capacity`, and then says so; "ring" any number, of
            which each query sees the last `capacity`, its own included, in memory for about twice as many: a layer with
            it computes what it computes with `window(left=capacity - 1)`; "paged" takes pages of `pool`.
        capacity: tokens of a row, for "fixed" and "ring".
        pool: a `PagePool`, for "paged".
        dtype: the stored form: None as the tokens come, torch.bfloat16 or another floating dtype, or torch.int8 with
            a scale for each head of each token. What is read has the dtype of what came. For "paged" it is the pool's.

    Rows may be of different length. Decode under `torch.no_grad()`: where gradients are recorded each call makes new
    tensors. Without, a layer on a CPU reads pages, bfloat16, float16 and int8 where they lie (by the native kernel);
    elsewhere, and by `append` and `read`, they are copied, or converted, for each call.

    Attributes:
        frozen: whether nothing can be added, as in a cache of an encoder's output: see `Attention.context_cache`.

    Raises:
        ValueError, TypeError: options that do not fit each other.
    """

    def __init__(
        self,
        storage: str = "growing",
        *,
        capacity: int | None = None,
        pool: PagePool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if storage not in _KINDS:
            raise bad_value("storage", f"one of {', '.join(_KINDS)}", describe(storage))
        if (capacity is not None) != (storage in ("fixed", "ring")):
            expected = "a number of tokens" if capacity is None else "nothing"
            raise bad_value("capacity", f'{expected} for storage "{storage}"', capacity)
        if storage == "paged" and not isinstance(pool, PagePool):
            raise bad_type("pool", 'a PagePool for storage "paged"', pool, "", "Make one: PagePool(pages=256).")
        if pool is not None and storage != "paged":
            raise bad_value("pool", f'nothing for storage "{storage}"', describe(pool))
        if pool is not None and dtype is not None:
            raise bad_value("dtype", 'nothing for storage "paged"', dtype, "The pool's is taken.")
        self.storage = storage
        self.capacity = None if capacity is None else check_size("capacity", capacity)
        self.frozen = False
        self._format = Format(dtype) if pool is None else pool.format
        self._window = self.capacity if storage == "ring" else None
        self._room = None if self._window is None else 2 * self._window + _SPARE  # slots of a ring
        self._store: Storage = Rows(self._room or capacity) if pool is None else Pages(pool)
        self._wanted: tuple[int, ...] | None = None  # batch axes that the first tokens must have
        self._ledger: Ledger | None = None
        self._kind: tuple[Any, ...] = ()  # K, D, V, dtype and device of the tokens

    # What it holds ----------------------------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Tokens of the longest row, those that a ring has let go included."""
        return 0 if self._ledger is None else max(self._ledger.totals, default=0)

    def lengths(self, device: torch.device | str | None = None) -> Tensor:
        """Tokens of each row, those that a ring has let go included: (*batch), int64; (0,) before the first tokens."""
        if self._ledger is None:
            return torch.zeros(0, dtype=torch.int64, device=device)
        return torch.tensor(self._ledger.totals, dtype=torch.int64, device=device).view(self._ledger.batch)

    @property
    def batch_shape(self) -> tuple[int, ...] | None:
        """The batch axes of what it holds; None before the first tokens."""
        return None if self._ledger is None else self._ledger.batch

    @property
    def nbytes(self) -> int:
        """Bytes that it holds, room for tokens to come included."""
        positions = None if self._ledger is None else self._ledger.positions
        return self._store.nbytes + (0 if positions is None else positions.numel() * positions.element_size())

    def __repr__(self) -> str:
        told = [f'"{self.storage}"']
        told += [f"capacity={self.capacity}"] if self.capacity is not None else []
        told += [f"dtype={self._format.dtype}"] if self._format.dtype is not None else []
        rows = "" if self._ledger is None else f" of {len(self._ledger.lengths)} rows"
        return f"KVCache({', '.join(told)}): {self.length} tokens{rows}, {self.nbytes:,} bytes"

    def read(self) -> tuple[Tensor, Tensor]:
        """The keys (*batch, K, S, D) and values (*batch, K, S, V) of all slots, in the dtype in which they came.

        Row b's are the first `lengths` of them, in a ring the last of those; what other slots hold has no meaning.

        Raises:
            ValueError: it holds nothing yet.
        """
        return self.stored().read()

    def stored(self) -> Stored:
        """What `read` gives, in the form in which it is stored. Errors: as of `read`."""
        return self._stored(self._held().stop)

    def next_positions(self, L: int, keep: Tensor | None = None, device: torch.device | str | None = None) -> Tensor:
        """Where the next L tokens of each row stand by default: after its last one.

        Args:
            L: how many.
            keep: (*batch, L) bool, which of them are real; others count for nothing.
            device: of the result; by default that of `keep`, or of what it holds.

        Returns:
            int64 (L,), or (*batch, L) where rows differ.
        """
        own: torch.device | None = self._kind[4] if self._kind else None
        batch: tuple[int, ...] = ()
        if isinstance(keep, Tensor):
            own, batch = keep.device, tuple(keep.shape[:-1])
        ledger = self._ledger or Ledger(batch, [0] * math.prod(batch), [0] * math.prod(batch))
        flat = None if keep is None else check_keep(keep, ledger.batch, L)
        return ledger.next_positions(L, flat, own if device is None else torch.device(device))

    # Adding -----------------------------------------------------------------------------------------------------------

    def append(
        self, k: Tensor, v: Tensor, *, positions: Tensor | None = None, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Step]:
        """Add tokens.

            k, v, step = cache.append(k, v)
            out = attention(q, k, v, causal(), q_positions=step.q_positions, k_positions=step.k_positions)

        Args:
            k: (*batch, K, L, D), after what turns them by position.
            v: (*batch, K, L, V).
            positions: where they stand, (L,) or (*batch, L); by default as `next_positions` says.
            keep: (*batch, L) bool, which of them are real. Others are not stored.

        Returns:
            Keys and values of all that the new tokens may see, (*batch, K, S, width), and the `Step`: positions, and
            where it has one, a mask that joins others by `&`. They are views: valid until the next change.

        Raises:
            ValueError, TypeError: it is full or frozen, or something does not fit what it holds. It is as it was then.
        """
        check_tokens(k, v)
        step = self.prepare(tuple(k.shape[:-3]), k.shape[-2], k.device, positions=positions, keep=keep)
        return *self._add(step, k, v).read(), step

    def prepare(
        self,
        batch: tuple[int, ...],
        L: int,
        device: torch.device,
        *,
        positions: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> Step:
        """What adding L tokens will come to. Changes nothing. Arguments and errors: as of `append`."""
        self._check_not_frozen("Pass the queries alone.")
        held = self._wanted if self._ledger is None else self._ledger.batch
        if held is not None and batch != held:
            instead = "Choose rows with reorder(), or make another cache."
            raise bad_value("cache", f"tokens with the batch axes of the cache, {held}", f"{batch}", "", instead)
        B = math.prod(batch)
        keep = None if keep is None else check_keep(keep, batch, L)
        counts = [L] * B if keep is None else keep.sum(-1).tolist()
        if counts.count(L) == B:
            keep = None
        ledger = self._ledger or Ledger(batch, [0] * B, [0] * B)
        moves = self._room is not None and ledger.stop + L > self._room
        before = ledger.with_last(self._kept) if moves else ledger
        place = Place(before.lengths, L, keep, counts)
        if self.storage == "fixed":
            self._check_capacity(place)
        self._store.check(place)

        given = None if positions is None else check_places(positions, batch, L, device)
        is_counted = given is None and ledger.positions is None

        def find_places() -> Tensor:
            return ledger.next_positions(L, keep, device) if given is None else given

        after = before.with_new(place, None if is_counted else find_places(), device)
        if self._window is not None:
            after.check_rises()
        S, mask, first = after.stop, after.mask(device), 0
        if self._window is not None:
            if place.is_even:
                S = min(S, self._window - 1 + L)
                first = after.stop - S
            # A single query at the end of even rows is given no more than its window: that needs no mask.
            if not (is_counted and place.is_even and (L == 1 or self._window >= S)):
                reach = window(left=self._window - 1)
                mask = reach if mask is None else mask & reach
        if is_counted and place.is_even and first == 0 and not any(after.gone):
            return Step(S, mask, None, None, find_places, place, after, self._ledger, moves)
        k_at = after.slot_positions(first, device)
        return Step(S, mask, find_places(), k_at, find_places, place, after, self._ledger, moves)

    def write(self, step: Step, k: Tensor, v: Tensor) -> Stored:
        """Add the tokens that `step` was prepared for; what they attend to, as it is stored. Else as `append`."""
        check_tokens(k, v)
        return self._add(step, k, v)

    def _add(self, step: Step, k: Tensor, v: Tensor) -> Stored:
        """`write`, of checked tokens."""
        place, after = step._place, step._after
        if place is None or after is None:
            raise bad_type("step", "a step of prepare()", "one of look(), which adds nothing")
        if step._before is not self._ledger:
            raise bad_value("step", "one that was prepared for what the cache holds now", "an older one")
        if (*k.shape[:-3], k.shape[-2]) != (*after.batch, place.L):
            raise bad_value("k", f"L={place.L} tokens with the batch axes {after.batch}, as prepared", describe(k))
        kind = (k.shape[-3], k.shape[-1], v.shape[-1], k.dtype, k.device)
        if self._kind and kind != self._kind:
            form = "K={}, D={}, V={}, dtype={}, device={}"
            own, got = (form.format(*tokens) for tokens in (self._kind, kind))
            raise bad_value("cache", f"tokens like those that it holds, {own}", got, "", "Make another cache.")
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            self._check_keeps_gradients()
        self._format.check(k)
        if k.ndim != 4:
            k, v = (x.reshape(len(place.starts), *x.shape[-3:]) for x in (k, v))
        new = [*self._format.stored(k), *self._format.stored(v)]
        if step._moves and self._ledger is not None:
            self._ledger = self._with_last(self._ledger)  # true already, should writing fail
        self._store.write(new, place)
        self._kind, self._ledger = kind, after
        found = self._stored(step.S)
        if self._room is not None and after.stop > self._room:  # a chunk larger than the ring
            self._ledger = self._with_last(after)
        return found

    def expect(self, batch: tuple[int, ...]) -> KVCache:
        """Take only these batch axes, also of the first tokens. Returns itself."""
        self._wanted = batch
        return self

    def freeze(self) -> KVCache:
        """Let nothing be added from now on. Returns itself."""
        self.frozen = True
        return self

    def look(self, batch: tuple[int, ...], L: int, device: torch.device, positions: Tensor | None = None) -> Step:
        """What L queries attend to in a frozen cache, as a step that adds nothing.

        Args:
            batch: their batch axes.
            L: how many.
            device: theirs.
            positions: where they stand, (L,) or (*batch, L); by default they are the last L of its S tokens.

        Raises:
            ValueError, TypeError: it is empty, or something does not fit it.
        """
        ledger = self._held()
        if batch != ledger.batch:
            raise bad_value("cache", f"the batch axes of the queries, {batch}", f"{ledger.batch}")
        S, mask = ledger.stop, ledger.mask(device)
        if positions is None and ledger.positions is None:
            return Step(S, mask, None, None, lambda: torch.arange(S - L, S, device=device))
        if positions is None:  # where the last L of its tokens stand
            if L > S:
                otherwise = "The context's own positions can't say where so many queries stand."
                raise bad_value("positions", f"given where L={L} queries are more than S={S}", None, otherwise)
            k_at = ledger.slot_positions(0, device)
            return Step(S, mask, k_at[..., S - L :], k_at, lambda: k_at[..., S - L :])
        places = check_places(positions, batch, L, device)
        return Step(S, mask, places, ledger.slot_positions(0, device), lambda: places)

    # Changing ---------------------------------------------------------------------------------------------------------

    def reorder(self, rows: Tensor | Sequence[int]) -> None:
        """Make row i what row rows[i] is, as the steps of a beam search do. Pages are shared then, not copied.

        Args:
            rows: (B',) ints, which may repeat rows and leave some out.

        Raises:
            ValueError, TypeError: rows holds no ints, or one that is no row; or the cache has no single batch axis.
        """
        ledger = self._held()
        if len(ledger.batch) != 1:
            raise bad_value("reorder(rows)", "a cache with one batch axis", f"batch axes {ledger.batch}")
        index = check_rows(rows, ledger.batch[0])
        if index == list(range(ledger.batch[0])):
            return
        self._store.reorder(index, ledger.lengths)
        self._ledger, self._wanted = ledger.with_rows(index), (len(index),)

    def crop(self, length: int | Sequence[int] | Tensor) -> None:
        """Keep the first `length` tokens of each row, as speculative decoding does when it rejects some.

        Args:
            length: a number for all rows, of which a shorter one stays as it is; or (B,) ints. Counted as `lengths`.

        Raises:
            ValueError, TypeError: no ints, below 0, more than a row has, or a ring has let go what would be seen again.
        """
        self._check_not_frozen("")
        totals = [] if self._ledger is None else self._ledger.totals
        wanted = check_counts(length, totals)
        if self._ledger is None:
            return
        for n, gone in zip(wanted, self._ledger.gone, strict=True):
            if gone and self._window is not None and n - gone < self._window - 1:
                least, otherwise = gone + self._window - 1, "The ring has let go tokens that would be seen again."
                raise bad_value("crop(length)", f"at least {least}", n, otherwise, "Reset it and add them anew.")
        left = [n - gone for n, gone in zip(wanted, self._ledger.gone, strict=True)]
        self._store.truncate(left)
        self._ledger = self._ledger.with_lengths(left)

    def reset(self) -> None:
        """Let go all that it holds, pages included. It can then take tokens of another kind."""
        self._store.clear()
        self._ledger, self._kind, self._wanted, self.frozen = None, (), None, False

    def fork(self) -> KVCache:
        """Another cache with the same content. In a pool it holds the same pages, until one of both writes into one."""
        other = KVCache.__new__(KVCache)
        other.__dict__.update(self.__dict__)
        other._store = self._store.fork()
        return other

    __copy__ = fork  # a plain copy would share the storage, and each would change the other

    # Keeping ----------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """What it holds as tensors, without spare room: stored keys and values (with int8 also `k_scale`, `v_scale`),
        `lengths`, `gone` and `batch`, `positions` where they are not just counted, and `like`, which has no numbers, in
        the dtype of what is read; `frozen`. Empty for an empty cache."""
        if self._ledger is None:
            return {}
        parts = self.stored().in_rows().parts
        return to_state(self._ledger, self._format, parts, self._kind[3], self.frozen)

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Hold what `state_dict` gave, in this cache's own storage. What it held before is let go.

        Raises:
            ValueError: entries are missing, or were stored in another form than this cache stores, or don't fit in. It
                is as it was then.
        """
        if not state:
            self.reset()
            return
        ledger, place = from_state(state, self._format)
        if self.storage == "fixed":
            self._check_capacity(place)
        if (any(ledger.gone) and self._room is None) or (self._room is not None and self._room < place.L):
            got = f"{max(ledger.gone)} tokens let go, {place.L} kept"
            raise bad_value("state", f'what fits storage "{self.storage}"', got)
        window = self._window or 0
        if any(gone and n < window - 1 for n, gone in zip(ledger.lengths, ledger.gone, strict=True)):
            expected, got = f"the last {window} tokens of a ring", f"{min(ledger.lengths)} of a smaller one"
            raise bad_value("state", expected, got, "What it has let go would be seen here.")
        if self._wanted not in (None, ledger.batch):
            raise bad_value("state", f"the batch axes {self._wanted}", f"{ledger.batch}")
        other = self.fork()
        other.reset()
        other._store.check(place)
        other._store.write([state[name] for name in self._format.names], place)
        other._ledger, other._wanted, other.frozen = ledger, self._wanted, bool(state["frozen"])
        k, v = state["k"], state["v"]
        other._kind = (k.shape[1], k.shape[3], v.shape[3], state["like"].dtype, k.device)
        self.__dict__.update(other.__dict__)

    # Inside -----------------------------------------------------------------------------------------------------------

    @property
    def _kept(self) -> int:
        """How many tokens a ring keeps when it moves: what the next query may see, and some to crop."""
        return (self._window or 1) - 1 + _SPARE

    def _with_last(self, ledger: Ledger) -> Ledger:
        """A ring's ledger, once its storage holds no more than the last tokens."""
        assert isinstance(self._store, Rows)  # as any ring's
        self._store.keep_last(ledger.lengths, self._kept, self._room or 0)
        return ledger.with_last(self._kept)

    def _held(self) -> Ledger:
        if self._ledger is None:
            raise bad_value("cache", "one that tokens were added to", "an empty one")
        return self._ledger

    def _stored(self, S: int) -> Stored:
        """The last S slots."""
        ledger = self._held()
        parts, pages = self._store.parts_of(ledger.stop - S, ledger.stop)
        return Stored(self._format, parts, pages, S, ledger.batch, self._kind[3])

    def _check_capacity(self, place: Place) -> None:
        most = max(place.ends, default=0)
        if self.capacity is not None and most > self.capacity:
            got = f"{most} tokens, of which {max(place.starts, default=0)} are there"
            instead = 'Make it larger, crop it, or take storage "growing", or "ring" for a window.'
            raise bad_value("cache", f"at most capacity={self.capacity} tokens", got, "It is as it was.", instead)

    def _check_not_frozen(self, instead: str) -> None:
        if self.frozen:
            otherwise = "It holds a context, which does not change."
            raise bad_value("cache", "one that can be changed", "a frozen one", otherwise, instead)

    def _check_keeps_gradients(self) -> None:
        if not self._store.differentiable or self._format.dtype == torch.int8:
            what = "int8" if self._format.dtype == torch.int8 else "pages"
            instead = "Call it under torch.no_grad(), or take a growing cache."
            raise bad_value("cache", "no gradients to keep", f"k or v with a gradient, into {what}", "", instead)
