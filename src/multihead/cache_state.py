"""What a `KVCache` holds as a dict of tensors, as `state_dict` gives it and `load_state_dict` takes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multihead.cache_format import Format
from multihead.cache_ledger import Ledger
from multihead.cache_storage import Place
from multihead.errors import bad_value


def to_state(
    ledger: Ledger, form: Format, parts: Sequence[Tensor], like: torch.dtype, frozen: bool
) -> dict[str, Tensor]:
    """The entries: stored keys and values by the names of their parts, `lengths`, `gone` and `batch`, `positions` where
    they are not just counted, `like`, which has no numbers, in the dtype of what is read, and `frozen`."""
    state = {name: part.detach().clone() for name, part in zip(form.names, parts, strict=True)}
    for name, numbers in (("lengths", ledger.lengths), ("gone", ledger.gone), ("batch", ledger.batch)):
        state[name] = torch.tensor(numbers, dtype=torch.int64)
    state["like"], state["frozen"] = torch.empty(0, dtype=like), torch.tensor(frozen)
    if ledger.positions is not None:
        state["positions"] = ledger.positions.clone()
    return state


def from_state(state: dict[str, Tensor], form: Format) -> tuple[Ledger, Place]:
    """What a state's tokens are, and where they go in an empty storage.

    Raises:
        ValueError: entries are missing or strange, or the tokens were stored in another form.
    """
    wanted = {*form.names, "lengths", "gone", "batch", "like", "frozen"}
    if set(state) - {"positions"} != wanted:
        raise bad_value("state", f"the entries {', '.join(sorted(wanted))}", ", ".join(sorted(state)))
    stored, like = state["k"].dtype, state["like"].dtype
    if stored != (form.dtype or like):
        raise bad_value("state", f"tokens stored in {form.dtype or like}", f"{stored}")
    counts, gone = state["lengths"].tolist(), state["gone"].tolist()
    L, device = state["k"].shape[2], state["k"].device
    even = counts.count(L) == len(counts)
    keep = None if even else torch.arange(L, device=device) < state["lengths"].to(device)[:, None]
    ledger = Ledger(tuple(state["batch"].tolist()), counts, gone, state.get("positions"))
    return ledger, Place([0] * len(counts), L, keep, counts)
