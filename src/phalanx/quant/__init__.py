"""Quantised formats at work, one file a kind: what a checkpoint keeps, what a rank holds, and the products with it.

How a checkpoint's tensors are named and shaped is in `phalanx.spec.schemes`.
"""

from phalanx.quant.schemes import at_work

__all__ = ["at_work"]
