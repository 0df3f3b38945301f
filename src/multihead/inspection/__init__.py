"""Looking into attention: weights and statistics without the L x S matrix, of a model that runs or of any q and k."""

from multihead.inspection.capturing import Capture, capture
from multihead.inspection.importance import head_importance
from multihead.inspection.record import Record
from multihead.inspection.summary import Summary

__all__ = ["Capture", "Record", "Summary", "capture", "head_importance"]
