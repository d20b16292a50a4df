"""The ways in which restores fail in public, each with the finding that names it; the tables' own tests plant them."""

import pytest

from reports.drill_codes import DRILL_CODES
from tests.faults.faults_in_checkpoints import FAULTS
from tests.faults.faults_in_resume import RESUMES

CLASSICS = {
    "model_only_save": "components.model-only",
    "metadata_without_ranks": "commit.ranks-missing",
    "other_world": "resume.world-changed",
    "optimizer_lost": "components.optimizer-lost",
    "moments_misaligned": "consistency.moment-shape",
    "data_position_lost": "components.data-position",
    "save_blocks_too_long": "objectives.save-blocks",
    "export_never_verified": "objectives.export-unverified",
    "keys_renamed_by_an_upgrade": "drift.keys",
}
# What a resume can lose or shift, though the first loss is equal in most
RESUME_FAULTS = {
    "optim_lost": "resume.optimizer-lost",
    "optim_step_zero": "resume.optimizer-step",
    "moments_misaligned": "resume.moments-misaligned",
    "first_moment_lost": "resume.first-moment-lost",
    "moments_bf16": "resume.moments-rounded",
    "lr_restart": "resume.lr-restarted",
    "lr_double": "resume.lr-doubled",
    "lr_off_by_one": "resume.lr-shifted",
    "rng_lost": "resume.random-numbers",
    "data_restart": "resume.data-restarted",
    "data_reseeded": "resume.data-reordered",
    "data_off_by_one": "resume.data-skipped",
    "data_repeat": "resume.data-repeated",
}


@pytest.mark.parametrize(("name", "code"), CLASSICS.items())
def test_a_classic_failure_is_planted_and_has_a_code_of_its_own(name, code):
    assert code in {fault.code for fault in (*FAULTS, *RESUMES) if fault.name == name}
    assert code in DRILL_CODES
    assert list(CLASSICS.values()).count(code) == 1


@pytest.mark.parametrize(("name", "code"), RESUME_FAULTS.items())
def test_a_fault_of_a_resume_is_planted_and_has_a_code_of_its_own(name, code):
    assert code in {fault.code for fault in RESUMES if fault.name == name}
    assert list(RESUME_FAULTS.values()).count(code) == 1
