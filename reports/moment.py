"""Where in its training run a checkpoint was made."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in a training run, by which saves, logs and all that is made of them are lined up: the step, and the tokens consumed up to
    and with it. None: nobody tells.
    """

    step: int | None = None
    consumed_tokens: int | None = None

    def spell(self) -> str:
        """Return it in words.

        Returns:
            "step 3, 49,152 tokens"; "" when neither is known.
        """
        step = "" if self.step is None else f"step {self.step}"
        tokens = "" if self.consumed_tokens is None else f"{self.consumed_tokens:,} tokens"
        return ", ".join(filter(None, (step, tokens)))
