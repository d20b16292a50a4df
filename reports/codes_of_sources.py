"""Codes of what a checkpoint itself shows against its release: such a source is refused, and the refusal's report holds the finding."""

from collections.abc import Mapping
from types import MappingProxyType

from reports.code import Code

CODES_OF_SOURCES: Mapping[str, Code] = MappingProxyType(
    {
        "source.config-contradicts": Code(
            "the config is not that of the model the trainer ran", "Give the config.json of this very model with --assets."
        ),
        "source.file-changed": Code(
            "a file of the checkpoint is not the one whose sha256 its writer noted", "Restore the files from another copy."
        ),
        "source.ranks-exchanged": Code(
            "ranks' files do not lie where their writers would have put them", "Put each file back into its own folder."
        ),
        "source.replicas-differ": Code(
            "a weight that several ranks hold is not the same on all of them",
            "These ranks held different values when they saved; export another step.",
        ),
        "source.vocabulary-short": Code(
            "the config has more tokens than the checkpoint has rows", "Give the config.json of this very model with --assets."
        ),
        "source.tied-copy-differs": Code(
            "the stored copy of a tied weight has parted from it",
            "If the head was trained apart, set tie_word_embeddings to false; else export another step.",
        ),
    }
)
