"""Planted faults of restores and resumes, and the code that must say so."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from validators.drills.evidence import DrillEvidence


@dataclass(frozen=True)
class ResumeFault:
    """A trainer of tests.builders.faulty_resume, called `name`, that restores wrongly; `changes_first_loss` is whether step 1 shows it."""

    name: str
    code: str
    changes_first_loss: bool = False


@dataclass(frozen=True)
class RestoreFault:
    """A way that what a restore or a damaged copy gave is wrong: `amend` changes the evidence of a sound drill."""

    name: str
    code: str
    amend: Callable[[DrillEvidence], DrillEvidence]


RESUMES: tuple[ResumeFault, ...] = (
    ResumeFault("optim_lost", "resume.optimizer-lost"),
    ResumeFault("optim_zeroed", "resume.optimizer-lost"),
    ResumeFault("optim_step_zero", "resume.optimizer-step"),
    ResumeFault("first_moment_lost", "resume.first-moment-lost"),
    ResumeFault("moments_misaligned", "resume.moments-misaligned"),
    ResumeFault("moments_bf16", "resume.moments-rounded"),
    ResumeFault("moments_scaled", "resume.moments"),
    ResumeFault("weights_bf16", "resume.weights", changes_first_loss=True),
    ResumeFault("lr_restart", "resume.lr-restarted"),
    ResumeFault("lr_restart", "resume.schedule"),
    ResumeFault("lr_double", "resume.lr-doubled"),
    ResumeFault("lr_off_by_one", "resume.lr-shifted"),
    ResumeFault("lr_halved", "resume.lr"),
    ResumeFault("rng_lost", "resume.random-numbers", changes_first_loss=True),
    ResumeFault("data_restart", "resume.data-restarted", changes_first_loss=True),
    ResumeFault("data_off_by_one", "resume.data-skipped", changes_first_loss=True),
    ResumeFault("data_repeat", "resume.data-repeated", changes_first_loss=True),
    ResumeFault("data_reseeded", "resume.data-reordered", changes_first_loss=True),
    ResumeFault("data_reseeded", "resume.loss", changes_first_loss=True),
    ResumeFault("last_bit_of_the_loss", "resume.loss-rounded", changes_first_loss=True),
    ResumeFault("other_world", "resume.world-changed"),
    ResumeFault("counter_lost", "resume.counter"),
    ResumeFault("raises", "resume.refused"),
)


def _first(evidence: DrillEvidence, **changed: object) -> DrillEvidence:
    return replace(evidence, restored=(replace(evidence.restored[0], **changed), *evidence.restored[1:]))


def _other_digest(evidence: DrillEvidence) -> DrillEvidence:
    digests = dict(evidence.restored[0].digests)
    return _first(evidence, digests={key: "0" * 64 if key == "exp_avg/up.bias" else value for key, value in digests.items()})


def _dropped_on_saving(evidence: DrillEvidence) -> DrillEvidence:
    again = dict(evidence.restored[0].saved_again or {})
    again.pop("exp_avg/up.bias")
    return _first(evidence, saved_again=again)


RESTORES: tuple[RestoreFault, ...] = (
    RestoreFault("torch_refuses_the_save", "restore.refused", lambda evidence: _first(evidence, refusal="CheckpointException", digests={})),
    RestoreFault("restored_tensor_differs", "restore.differs", _other_digest),
    RestoreFault("tensor_not_restored", "restore.differs", lambda evidence: _first(evidence, digests={})),
    RestoreFault("tensor_lost_on_saving_again", "restore.not-fixed", _dropped_on_saving),
    RestoreFault(
        "value_changed_on_saving_again", "restore.not-fixed", lambda evidence: _first(evidence, values_again={"train_state.step": "0"})
    ),
    RestoreFault(
        "damaged_copy_accepted",
        "negative.not-refused",
        lambda evidence: replace(evidence, sabotage=(replace(evidence.sabotage[0], refused=False), *evidence.sabotage[1:])),
    ),
    RestoreFault(
        "wrong_save_chosen_beside_a_damaged_copy",
        "negative.no-fallback",
        lambda evidence: replace(evidence, sabotage=(replace(evidence.sabotage[0], chosen=""), *evidence.sabotage[1:])),
    ),
)
