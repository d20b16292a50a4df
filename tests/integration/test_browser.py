"""The pages of `shardwright serve` in a real browser: forms filled in, runs watched, an approval answered.

Screenshots stay in pytest's folder of the run: look at them when a page changes.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.served import CASE, Served, make_run, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")]
PATIENCE = 180_000  # ms
READ_ONLY = {"source": str(CASE / "ckpt"), "assets": str(CASE / "hf")}


class Browser:
    """One page of the served UI."""

    def __init__(self, page, served: Served, pictures: Path) -> None:
        self.page, self.served, self.pictures = page, served, pictures
        page.set_default_timeout(PATIENCE)

    def open_form(self, deployment: str) -> None:
        self.page.goto(f"{self.served.page}/v2/deployments/deployment/{self.served.deployment(deployment)['id']}/run")
        self.page.get_by_role("button", name="Submit").wait_for()

    def box(self, label: str):
        """The field under a label; Prefect marks those with a default as optional."""
        found = self.page.locator("label", has_text=re.compile(rf"^{label}( \(Optional\))?$"))
        return found.locator("xpath=../../..")

    def fill(self, label: str, text: str) -> None:
        box = self.box(label)
        box.wait_for()
        if (tab := box.get_by_role("tab", name="path")).count():  # an optional path is one or None
            tab.click()
        box.locator("textarea").fill(text)

    def switch(self, label: str) -> None:
        self.box(label).get_by_role("switch").click()

    def submit(self) -> str:
        """Submit the form and return the run's id."""
        before = {run["id"] for run in self._runs()}
        self.page.get_by_role("button", name="Submit").click()
        while not (new := [run["id"] for run in self._runs() if run["id"] not in before]):
            self.page.wait_for_timeout(500)
        return new[0]

    def _runs(self) -> list[dict]:
        return self.served.post("/flow_runs/filter", sort="EXPECTED_START_TIME_DESC", limit=50).json()

    def show(self, run: str, tab: str, wanted: str, picture: str) -> str:
        """Open a tab of a run's page, wait for a text on it, and take a picture."""
        self.page.goto(f"{self.served.page}/v2/runs/flow-run/{run}?tab={tab}")
        self.page.get_by_text(wanted).first.wait_for()
        self.page.screenshot(path=self.pictures / f"{picture}.png", full_page=True)
        return self.page.inner_text("body")


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("served")
    make_run(place)
    with serving(place, "--root", "run") as running:
        yield running
        running.stop()


@pytest.fixture(scope="module")
def browser(served, tmp_path_factory) -> Iterator[Browser]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1300, "height": 1000})
        yield Browser(page, served, tmp_path_factory.mktemp("pictures"))
        chromium.close()


def test_an_export_is_asked_for_watched_and_read(browser, served):
    browser.open_form("export/on-demand")
    browser.fill("Source", READ_ONLY["source"])
    browser.fill("To", str(served.place / "release"))
    browser.fill("Assets", READ_ONLY["assets"])
    browser.page.screenshot(path=browser.pictures / "form.png", full_page=True)
    run = browser.submit()
    assert served.wait(run)["state_type"] == "COMPLETED"
    assert (served.place / "release/shardwright.committed").is_file()
    assert "export ckpt" in browser.show(run, "Artifacts", "report", "export-artifacts")
    assert "mapping proven by" in browser.show(run, "Logs", "mapping proven by", "export-logs")


def test_a_drill_reads_well(browser, served):
    browser.open_form("restore%20drill/nightly")
    run = browser.submit()
    assert served.wait(run)["state_type"] in ("COMPLETED", "FAILED")
    assert "drill run" in browser.show(run, "Artifacts", "report", "drill-artifacts")


def test_a_failing_gate_says_what_is_wrong(browser, served):
    folder = served.place / "broken"
    shutil.copytree(CASE / "hf", folder)
    (folder / "model.safetensors").write_bytes(b"\0" * 64)
    browser.open_form("release%20gate/on-demand")
    browser.fill("Release", str(folder))
    run = browser.submit()
    assert served.wait(run)["state_type"] == "FAILED"
    assert "files.malformed" in browser.show(run, "Logs", "files.malformed", "gate-logs")
    browser.show(run, "Artifacts", "report", "gate-artifacts")


def test_an_approval_is_asked_for_in_a_form_and_rejected_by_default(browser, served):
    browser.open_form("export/on-demand")
    browser.fill("Source", READ_ONLY["source"])
    browser.fill("To", str(served.place / "unapproved"))
    browser.fill("Assets", READ_ONLY["assets"])
    browser.switch("Approve")
    run = browser.submit()
    served.wait(run, {"PAUSED", "FAILED"})
    browser.show(run, "Logs", "Paused", "approval-paused")
    browser.page.get_by_role("button", name="Open menu").first.click()
    browser.page.get_by_role("menuitem", name="Resume").click()
    dialog = browser.page.get_by_role("dialog")
    dialog.get_by_text("ready to be published").first.wait_for()
    browser.page.screenshot(path=browser.pictures / "approval-form.png", full_page=True)
    dialog.get_by_role("button", name="Resume").click()
    over = served.wait(run)
    assert over["state_type"] == "FAILED"
    assert "approval.rejected" in over["state"]["message"]
    assert not (served.place / "unapproved").exists()
