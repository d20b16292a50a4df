"""The checks of a drill, in the order they are reported. A check is one file and one row here; its name is its file's name."""

from validators.drills import commit, components, consistency, drift, negative, objectives, restore, resume, state
from validators.drills.check import DrillCheck

DRILL_CHECKS: tuple[DrillCheck, ...] = (
    commit.CHECK,
    components.CHECK,
    state.CHECK,
    consistency.CHECK,
    restore.CHECK,
    resume.CHECK,
    negative.CHECK,
    objectives.CHECK,
    drift.CHECK,
)
