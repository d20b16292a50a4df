"""Tell a web hook whenever a restore drill fails or its process dies: Slack, PagerDuty, or a service of your own.

    PREFECT_API_URL=http://127.0.0.1:4200/api python docs/automations/drill_failed.py https://hooks.example.org/drills

The server sends the hook, so it fires while nobody watches. Run it again to change the address.
"""

import sys
from typing import cast
from uuid import UUID

from prefect.automations import Automation
from prefect.blocks.webhook import Webhook
from prefect.events import EventTrigger, Posture
from prefect.events.actions import CallWebhook
from prefect.exceptions import ObjectNotFound

NAME = "drill-failed"
STATES = {"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}
TEXT = '{"text": "{{ flow_run.name }}: {{ flow_run.state.message }}"}'


def main(address: str) -> None:
    """Create the automation, or replace the one made before.

    Args:
        address: where to POST.
    """
    hook = cast("UUID", Webhook(method="POST", url=address).save(NAME, overwrite=True))
    try:
        Automation.read(name=NAME).delete()
    except (ObjectNotFound, ValueError):
        print(f"{NAME} is new")
    trigger = EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={"prefect.resource.id": "prefect.flow.*", "prefect.resource.name": "restore drill"},
        expect=STATES,
        posture=Posture.Reactive,
        threshold=1,
    )
    Automation(name=NAME, trigger=trigger, actions=[CallWebhook(block_document_id=hook, payload=TEXT)]).create()
    print(f"failed drills are told to {address}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: drill_failed.py URL")
    main(sys.argv[1])
