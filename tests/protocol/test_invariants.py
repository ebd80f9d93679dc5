"""The invariants of the protocol, after every step of runs that Hypothesis makes up.

| invariant | where it is checked |
|---|---|
| I1 I2 I3 I5 I8 I10 I11 I12 I13 I15 I16 | `Auditor`, from the stored bytes, after every step |
| I4 a verdict depends on the bytes before it | two readers, one that read along and one that starts anew, agree |
| I6 I7 told is so | what returned counts, what was refused for good never does, late puts included |
| I9 one answer | all answers for an attempt and fallback have equal bytes |
| I14 nothing is given up | no actor deletes anything |
| I17 I18 never none by mistake | every answer is compared with the log at that moment |
| I19 two readers | what is quarantined was damaged |
| I20 inside the run | every key in storage |
| I21 progress | with no fault left a new incarnation comes through to a checkpoint |
| I22 bounded | calls per request, however bad the storage is |
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from tests.protocol.machine import Run

pytestmark = pytest.mark.timeout(900)  # a failure is made small before it is told

TestInvariants = Run.TestCase
TestInvariants.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
