"""The dashboard in a browser: updates, small and large windows, light and dark.

Its pictures are in the test's temporary folder (`pytest --basetemp=FOLDER`).
"""

import io
import json
import signal
import subprocess
import threading
import urllib.request

import pytest
from PIL import Image, ImageStat

from ravan_flwr.reports.dashboard import make_server
from testing.deployment import ROUNDS_TIMEOUT, TIMEOUT, wait_for
from tests import ROOT
from tests.browser import CHROMIUM, Browser
from tests.followed import NOW, lines, node, record, run_in, status
from tests.hostile_texts import HOSTILE

pytestmark = pytest.mark.slow

needs_browser = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


@pytest.fixture
def dashboard(tmp_path):
    """Serve the dashboard of a run with hostile texts; yield the run's folder and the address."""
    folder = run_in(tmp_path / "a-run", rounds=37)
    rejected = [{"client": "partition 4", "reason": HOSTILE[0]}]
    records = [record(number, rejected=rejected if number == 9 else []) for number in range(1, 38)]
    lines(folder, records)
    nodes = [node(number, device=HOSTILE[number]) for number in range(5)]
    status_record = status(
        round=38, rounds=60, nodes=nodes, refused=[{"node": "7", "reason": HOSTILE[2]}]
    )
    (folder / "status.json").write_text(json.dumps(status_record))
    with make_server(folder, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@needs_browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280], ids=["phone", "desk"])
def test_the_page_fits_the_window_and_can_be_read(browser, dashboard, tmp_path, width, dark):
    _, address = dashboard
    browser.ask(
        "Page.navigate", url="about:blank"
    )  # an earlier test's page polls a server that has ended
    browser.complaints.clear()
    browser.look_as(width=width, dark=dark)
    browser.go(address)
    picture = browser.picture(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
    with Image.open(io.BytesIO(picture)) as image:
        mean = sum(ImageStat.Stat(image.convert("L")).mean)
    assert mean < 60 if dark else mean > 200
    assert browser.complaints == []  # also without violations of the content security policy
    assert browser.see("document.documentElement.scrollWidth") == width  # no horizontal scroll bar
    # No element is wider than the window.
    assert browser.see(
        "[...document.querySelectorAll('figure, .facts div, .state, h2, .note, p')]"
        ".every(one => one.getBoundingClientRect().right <= innerWidth + 1)"
    )
    assert browser.see("document.querySelectorAll('svg').length") == 7
    smallest = "Math.min(...[...document.querySelectorAll('svg text')].map(one => " \
        "one.getBoundingClientRect().height))"  # fmt: skip
    assert browser.see(smallest) >= 10  # pixels


@needs_browser
def test_the_page_updates_and_keeps_open_details(browser, dashboard):
    folder, address = dashboard
    browser.look_as(width=1280)
    browser.go(address)
    browser.see("document.querySelector('details').open = true")
    browser.see("document.querySelector('h1').dataset.mine = 'kept'")
    with (folder / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(record(38, **{"train-loss": 0.1234})) + "\n")
    browser.wait_for("document.body.textContent.includes('0.1234')")
    assert browser.see("document.querySelector('details').open")
    assert browser.see("document.body.textContent.includes('38 of 60')")
    before = browser.see("document.querySelector('time').textContent")
    browser.wait_for(
        f"document.querySelector('time').textContent !== {before!r}"
    )  # the clock is updated
    (folder / "status.json").write_text(json.dumps(status(round=39, rounds=60, since=NOW)))
    browser.wait_for("document.body.textContent.includes('Round 39 of 60')")


@needs_browser
def test_texts_of_clients_run_no_script(browser, dashboard):
    folder, address = dashboard
    texts = [json.dumps(text) for text in HOSTILE]
    (folder / "log.txt").write_text("\n".join(HOSTILE), errors="backslashreplace")
    browser.ask(
        "Page.navigate", url="about:blank"
    )  # an earlier test's page polls a server that has ended
    browser.complaints.clear()
    browser.look_as(width=1280)
    browser.see("window.alert = () => { window.alerted = true; }")
    browser.go(address)
    browser.wait_for(f"document.body.textContent.includes({texts[0]})")
    assert browser.see("document.querySelectorAll('script').length") == 1
    assert browser.see("document.querySelectorAll('img').length") == 0
    assert not browser.see("window.alerted")
    assert browser.complaints == []


@needs_browser
def test_the_page_shows_that_the_server_does_not_answer(browser, tmp_path):
    with make_server(run_in(tmp_path), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        browser.look_as(width=1280)
        browser.go(f"http://127.0.0.1:{server.server_port}/")
        assert browser.see("document.getElementById('lost').hidden")
        server.shutdown()
    browser.wait_for("!document.getElementById('lost').hidden")
    assert "No answer from ravan-flwr report --live" in browser.see("document.body.innerText")


@needs_browser
def test_the_page_reloads_without_javascript(browser, dashboard):
    _, address = dashboard
    browser.look_as(width=1280, script=False)
    try:
        browser.go(address)
        assert browser.see("document.querySelectorAll('svg').length") == 7
        refresh = "document.querySelector('noscript meta[http-equiv=refresh]').content"
        assert browser.see(refresh) == "5"
    finally:
        browser.look_as(width=1280)


def page_at(address):
    with urllib.request.urlopen(address, timeout=TIMEOUT) as answer:
        return answer.read().decode()


def test_the_dashboard_follows_a_run_until_it_is_killed(python, tmp_path):
    """A real run, the dashboard in another process, SIGKILL, and Ctrl-C."""
    words = ["num-rounds=100000", "local-steps=1", "num-clients=3", "report=false",
             f"output-dir={tmp_path / 'runs'}", "tracking=none"]  # fmt: skip
    run = python.start(["-m", "ravan_flwr", "simulate", *words], log=tmp_path / "log")
    wait_for(lambda: any(tmp_path.glob("runs/*/rounds.jsonl")), "a round", ROUNDS_TIMEOUT)
    (folder,) = (tmp_path / "runs").iterdir()
    words = ["-m", "ravan_flwr", "report", "--live", str(folder), "--port", "0"]
    command = [python.executable, *words]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as dashboard_process:
        assert dashboard_process.stdout is not None
        address = dashboard_process.stdout.readline().split()[1]
        page = page_at(address)
        assert "running" in page
        assert " of 100000: " in page
        assert page.count("s</time> ago") == 3  # for each client
        run.send_signal(signal.SIGKILL)
        run.wait(TIMEOUT)
        page = page_at(address)
        assert "Its process is gone after" in page
        assert f"resume={folder}" in page
        dashboard_process.send_signal(signal.SIGINT)
        assert dashboard_process.wait(TIMEOUT) == 0
        assert dashboard_process.stdout.read() == "\n"
