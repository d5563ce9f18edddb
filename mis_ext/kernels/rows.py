"""Numbers of the rows in the kernels' buffers, as compile-time constants.

The order is that of the fields of :class:`~mis_ext.statistics.SequenceStatistics`,
:class:`~mis_ext.passes.Decisions` and :class:`~mis_ext.normalization.GroupTotals`; the tests compare the names.
"""

import triton.language as tl

# One column per sequence: statistics, then decisions.
NUM_RESPONSE = tl.constexpr(0)
NUM_VALID = tl.constexpr(1)
NUM_TOKEN_KEPT = tl.constexpr(2)
LOG_RATIO_SUM = tl.constexpr(3)
PROXIMAL_SUM = tl.constexpr(4)
BEHAVIOR_SUM = tl.constexpr(5)
RATIO_SUM = tl.constexpr(6)
SQUARED_RATIO_SUM = tl.constexpr(7)
SQUARED_RATIO_EXCESS = tl.constexpr(8)
TOKEN_WEIGHT_SUM = tl.constexpr(9)
TOKEN_WEIGHT_KEPT_SUM = tl.constexpr(10)
LOG_RATIO_MIN = tl.constexpr(11)
LOG_RATIO_MAX = tl.constexpr(12)
PROXIMAL_MIN = tl.constexpr(13)
NUM_STATISTICS = tl.constexpr(14)
USABLE = tl.constexpr(14)
KEEP = tl.constexpr(15)
SEQUENCE_WEIGHT = tl.constexpr(16)
KEPT_COUNT = tl.constexpr(17)
NUM_ROWS = tl.constexpr(18)

# One number per call, or per data-parallel group.
TOTAL_RATIO_SUM = tl.constexpr(0)
TOTAL_SQUARED_RATIO_SUM = tl.constexpr(1)
TOTAL_NUM_VALID = tl.constexpr(2)
TOTAL_SEQUENCE_RATIO_SUM = tl.constexpr(3)
TOTAL_SQUARED_SEQUENCE_RATIO_SUM = tl.constexpr(4)
TOTAL_NUM_MEASURED_SEQUENCES = tl.constexpr(5)
TOTAL_NUM_USABLE_SEQUENCES = tl.constexpr(6)
TOTAL_NUM_RESPONSE = tl.constexpr(7)
TOTAL_NUM_RESPONSE_SEQUENCES = tl.constexpr(8)
TOTAL_NUM_KEPT = tl.constexpr(9)
TOTAL_NUM_KEPT_SEQUENCES = tl.constexpr(10)
TOTAL_WEIGHT_SUM = tl.constexpr(11)
TOTAL_WEIGHT_COUNT = tl.constexpr(12)
TOTAL_ORIGINAL_TERMS = tl.constexpr(13)
TOTAL_KEPT_TERMS = tl.constexpr(14)
TOTAL_LOG_RATIO_MIN = tl.constexpr(15)
TOTAL_LOG_RATIO_MAX = tl.constexpr(16)
NUM_TOTALS = tl.constexpr(17)

# Levels of the weight.
NO_LEVEL = tl.constexpr(0)
TOKEN_LEVEL = tl.constexpr(1)
SEQUENCE_LEVEL = tl.constexpr(2)
GEOMETRIC_LEVEL = tl.constexpr(3)
