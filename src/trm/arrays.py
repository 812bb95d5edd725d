"""Names for the arrays that pass between rooms."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
BoolArray: TypeAlias = NDArray[np.bool_]
FloatArray: TypeAlias = NDArray[np.float64]
Float32Array: TypeAlias = NDArray[np.float32]
WordArray: TypeAlias = NDArray[np.uint64]
IntegerArray: TypeAlias = NDArray[np.integer]  # as stored: whatever width holds the values
