"""The finding codes of drills, part of the table in reports.codes."""

from collections.abc import Mapping
from types import MappingProxyType

from reports.code import Code

_SAVING = "Look at the run that wrote this save: its last save did not finish, or was changed afterwards."
_RESTORE_COPY = "Restore the save from a copy, or rely on the older one."
_SAVE_ALL = "Make the trainer save it; a resume starts it afresh."
_RESUME_CODE = "Mend what the trainer restores; the checkpoint itself is sound."
_REPORT = "Do not rely on this save; report it with the run folder."
_ORIGINAL = "Compare with the run that wrote it; if it is as it should be, record it again."

_COMMIT: dict[str, Code] = {
    "commit.none-complete": Code("no save can be restored", "Restore one from a copy; training cannot come back from what is here."),
    "commit.uncommitted": Code("a save without its commit marker was passed over", _SAVING, "warning"),
    "commit.ranks-missing": Code("a save whose metadata names ranks' files that are absent was passed over", _SAVING, "warning"),
    "commit.cut-short": Code("a save with a file cut short was passed over", _SAVING, "warning"),
    "commit.overwritten": Code("a save with parts of two saves was passed over", _SAVING, "warning"),
    "commit.hostile": Code("a save whose pickle asks for what could run was passed over", "Find out who wrote it.", "warning"),
    "commit.unreadable": Code("a save that no reader accepts was passed over", _SAVING, "warning"),
    "commit.damaged": Code("bytes of the chosen save are not what its writer recorded", _RESTORE_COPY),
    "commit.leftover": Code("a temporary or empty file of an interrupted write", "Remove it when nothing writes there.", "warning"),
    "commit.pointer": Code("the pointer file names a save that is not complete, or none", "Point it at the newest complete one."),
    "commit.pointer-older": Code("the pointer file names an older save than the newest complete one", "Right after a rollback.", "warning"),
}

_COMPONENTS: dict[str, Code] = {
    "components.model-only": Code("weights without any training state", "Save the optimizer and the rest; this brings back no training."),
    "components.optimizer-lost": Code(
        "the optimizer's groups are saved, its moments are not", "Save its state after the first step, by name."
    ),
    "components.scheduler": Code("no learning rate schedule, and no step to derive it from", _SAVE_ALL, "warning"),
    "components.random-numbers": Code("no random number state: dropout and shuffling differ after a resume", _SAVE_ALL, "warning"),
    "components.data-position": Code("no data position, and no step to derive it from: data is repeated or skipped", _SAVE_ALL),
    "components.data-derived": Code(
        "the data position is not saved; it must be derived", "Check that the trainer derives it, with --resume.", "warning"
    ),
    "components.train-step": Code("no step counter", _SAVE_ALL, "warning"),
    "components.scaler": Code("fp16 training without its loss scale", _SAVE_ALL, "warning"),
}

_STATE: dict[str, Code] = {
    "state.missing": Code("something that was recorded is no longer in the save", _RESTORE_COPY),
    "state.unexpected": Code("something is in the save that was not there when it was recorded", _ORIGINAL),
    "state.added": Code("a file or object that was not there when the save was recorded", "Look who put it there.", "warning"),
    "state.changed": Code("values differ from those recorded", _RESTORE_COPY),
}

_CONSISTENCY: dict[str, Code] = {
    "consistency.optimizer-restarted": Code(
        "every parameter's optimizer step is 0 in a run that has trained", "Look at how the optimizer is saved."
    ),
    "consistency.optimizer-step": Code(
        "the optimizer's step is not the trainer's", "Right with skipped or accumulated steps; else look at what is saved when.", "warning"
    ),
    "consistency.scheduler-restarted": Code(
        "the schedule is at step 0 in a run that has trained", "Right in the first epoch if it counts epochs; else it is lost.", "warning"
    ),
    "consistency.scheduler-step": Code(
        "the schedule's step is not the trainer's", "Right if it counts other units; else look at what is saved when.", "warning"
    ),
    "consistency.folder-step": Code(
        "the folder's name tells another step than the counter inside", "Rename it, if it was copied.", "warning"
    ),
    "consistency.ranks-lost": Code(
        "state that every rank saves for itself is there of some ranks only", "Look at how every rank saves it."
    ),
    "consistency.tokens": Code("consumed tokens are not steps times tokens per step", "Correct tokens_per_step, or find the lost batches."),
    "consistency.tokens-logged": Code(
        "consumed tokens are not those of the log", "Right if the two count other things; else find the lost batches.", "warning"
    ),
    "consistency.moment-shape": Code("a moment has another shape than its parameter", "The optimizer was misaligned when it was saved."),
    "consistency.orphan-moments": Code(
        "moments of parameters that the model does not have", "Model and optimizer are of two runs or versions."
    ),
    "consistency.moments-regrouped": Code(
        "moments of fused or split parameters: as many values as parameters without moments",
        "Check that the trainer regroups them.",
        "warning",
    ),
    "consistency.moments-unpaired": Code("parameters with one of Adam's two moments", "Look at how the optimizer is saved."),
    "consistency.first-moment-zero": Code("every first moment is zero while second moments are not", "The first moments were lost."),
    "consistency.moments-narrow": Code("16-bit moments of fp32 parameters", "Right only if the optimizer keeps them so.", "warning"),
}

_RESTORE: dict[str, Code] = {
    "restore.refused": Code("torch's own loader does not restore the save", "Look at the message; try another world size."),
    "restore.differs": Code("a tensor that torch's loader restored is not the one that is stored", _REPORT),
    "restore.not-fixed": Code("load, save and load again changes something", _REPORT),
}

_RESUME: dict[str, Code] = {
    "resume.refused": Code(
        "training does not continue from the save",
        "Look at the message: the trainer's code raised it, or torch's loader on what its state() gave.",
    ),
    "resume.world-changed": Code(
        "training was resumed by another number of ranks than had saved",
        "Data positions and random numbers are per rank: have the trainer redistribute them, and check the order of the data.",
        "warning",
    ),
    "resume.weights": Code("weights after the restore are not those saved", _RESUME_CODE),
    "resume.optimizer-lost": Code("the optimizer starts afresh: its moments are zero or absent", _RESUME_CODE),
    "resume.optimizer-step": Code("the optimizer's step after the restore is not the saved one", _RESUME_CODE),
    "resume.first-moment-lost": Code("every first moment is zero after the restore", _RESUME_CODE),
    "resume.moments-misaligned": Code("moments are restored to other parameters", "Restore them by name, not by position."),
    "resume.moments-rounded": Code("moments are rounded to 16 bits by the restore", _RESUME_CODE),
    "resume.moments": Code("moments after the restore are not those saved", _RESUME_CODE),
    "resume.schedule": Code("the learning rate schedule after the restore is not the saved one", _RESUME_CODE),
    "resume.counter": Code("step or token counters after the restore are not those saved", _RESUME_CODE),
    "resume.random-numbers": Code("random numbers do not go on where they were", "Restore the RNG last, after iterators are made."),
    "resume.lr-restarted": Code("the learning rate begins again", _RESUME_CODE),
    "resume.lr-doubled": Code("the schedule is advanced twice: once restored, once replayed", _RESUME_CODE),
    "resume.lr-shifted": Code("the learning rate is that of a step before or after", _RESUME_CODE),
    "resume.lr": Code("learning rates are not those logged", _RESUME_CODE),
    "resume.data-restarted": Code("the data begins again: batches are repeated", _RESUME_CODE),
    "resume.data-repeated": Code("batches from before the save come again", _RESUME_CODE),
    "resume.data-skipped": Code("batches are skipped", _RESUME_CODE),
    "resume.data-reordered": Code("batches are not those logged: another order or seed", _RESUME_CODE),
    "resume.loss-rounded": Code(
        "losses differ from those logged by rounding alone, where all else is equal", "Right if another kind of CPU logged them.", "warning"
    ),
    "resume.loss": Code("a loss is not the one logged, bit for bit", "Look at the other findings first; else at what else is random."),
}

_NEGATIVE: dict[str, Code] = {
    "negative.not-refused": Code("a damaged copy of the save was taken for a complete one", "Do not rely on this drill: report it."),
    "negative.no-fallback": Code(
        "beside a damaged copy another save was chosen than the one before", "Do not rely on this drill: report it."
    ),
}

_OBJECTIVES: dict[str, Code] = {
    "objectives.rto": Code("recovery takes longer than its target", "Save to faster storage, or raise the target."),
    "objectives.rpo": Code("more work would be lost than the target allows", "Save more often, or find out why the last saves failed."),
    "objectives.unmeasured": Code(
        "a target is set for what could not be measured",
        "Give --log with each step's tokens and time, or tokens_per_step in the goals.",
        "warning",
    ),
    "objectives.budget": Code("the saves take more than their budget", "Keep fewer."),
    "objectives.export-unverified": Code(
        "exports are scheduled, and no green one of this run is known", "Export or gate it, with the same --runs.", "warning"
    ),
    "objectives.free-space": Code("the next save may not fit", "Free space, or keep fewer.", "warning"),
    "objectives.save-blocks": Code("saves hold training for too much of its time", "Save asynchronously, or less often."),
    "objectives.interval": Code(
        "the save interval is far from Young's optimum", "Move it there, unless failures are found late.", "warning"
    ),
}

_DRIFT: dict[str, Code] = {
    "drift.keys": Code(
        "names changed since the last drill: an upgrade, or another model", "Map the old names before older saves are needed."
    ),
    "drift.state-keys": Code(
        "an optimizer's entries came or went since the last drill", "Right after unfreezing; else look why.", "warning"
    ),
    "drift.flattening": Code(
        "the optimizer's entries are spelled in another way than at the last drill",
        "Set the option back before older saves are loaded.",
        "warning",
    ),
    "drift.parameter-order": Code("the optimizer lists the same parameters in another order", "Restore by name, not by number.", "warning"),
    "drift.versions": Code("a framework changed since the last drill", "Drill again at level D3.", "warning"),
}

DRILL_CODES: Mapping[str, Code] = MappingProxyType(
    _COMMIT | _COMPONENTS | _STATE | _CONSISTENCY | _RESTORE | _RESUME | _NEGATIVE | _OBJECTIVES | _DRIFT
)
