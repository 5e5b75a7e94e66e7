"""Types of numpy arrays."""

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[Any]  # float32 or float16, often memory-mapped
Mask = npt.NDArray[np.bool_]
