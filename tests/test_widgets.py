"""The notebooks in JupyterLab, in a headless Chromium: sliders are moved, and pictures change.

Needs the extra "browser" and a Chromium or Chrome on the PATH. JAXSPEC_SCREENSHOTS=FOLDER keeps
what was seen, to be looked at.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import jax
import pytest

from jaxspec.weights.loading import shipped

COLAB = Path(__file__).resolve().parents[1] / "colab"
WIDGETS_PAGE = COLAB.parent / "docs" / "widgets.html"
ANSWER = 60_000  # milliseconds for a page, or a picture, to appear
SEEN = {  # colour and line of the words in a trace's legend
    "accepted draft token": ("rgb(0, 122, 90)", "none"),
    "rejected draft token": ("rgb(192, 57, 43)", "line-through"),
    "the target's own token": ("rgb(0, 89, 179)", "underline"),
}

pytestmark = pytest.mark.slow
if not COLAB.is_dir():
    pytest.skip("not in a checkout", allow_module_level=True)
pytest.importorskip("jupyterlab", reason="JupyterLab is not installed: see the extra `browser`")
pytest.importorskip("ipywidgets")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: see the extra `browser`"
)
if "debian-t5-large" not in shipped():
    pytest.skip("the checkpoints are not here", allow_module_level=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab that has copies of the notebooks, and settings of its own."""
    home = tmp_path_factory.mktemp("lab")
    root, settings = home / "root", home / "settings" / "@jupyterlab"
    root.mkdir()
    for notebook in COLAB.glob("*.ipynb"):
        shutil.copy(notebook, root)
    # Every cell is in the page, seen or not; and nothing is asked of the user or of the network.
    for extension, chosen in {
        "notebook-extension/tracker": {"windowingMode": "none"},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }.items():
        file = settings / f"{extension}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(chosen))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    options = dict(
        ip="127.0.0.1",
        port=port,
        port_retries=0,
        open_browser=False,
        root_dir=root,
        allow_root=True,
    )
    arguments = [f"--ServerApp.{name}={value}" for name, value in options.items()]
    arguments += [f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True"]
    variables = {
        "JUPYTERLAB_SETTINGS_DIR": settings.parent,
        "IPYTHONDIR": home / "ipython",
        "JAXSPEC_SMOKE": "1",
    }
    variables |= {
        f"JUPYTER_{kind}_DIR": home / kind.lower() for kind in ("CONFIG", "DATA", "RUNTIME")
    }
    cache = jax.config.jax_compilation_cache_dir  # the kernel is another process
    variables |= {"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *arguments],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait(f"http://127.0.0.1:{port}/api/status?token={token}", server, home / "log")
            yield lambda name: f"http://127.0.0.1:{port}/lab/tree/{name}.ipynb?reset&token={token}"
        finally:
            server.terminate()
            server.wait(timeout=60)


def _wait(address: str, server: subprocess.Popen, log: Path) -> None:
    """Until the server answers."""
    for _ in range(240):
        try:
            urllib.request.urlopen(address, timeout=5).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.5)
    raise TimeoutError(log.read_text())


@pytest.fixture(scope="module")
def browser(chromium_command):
    with playwright.sync_playwright() as driver:
        path, *flags = chromium_command
        chromium = driver.chromium.launch(executable_path=path, headless=True, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def run(lab, browser):
    """Opens a notebook and runs all of it; gives the page."""
    pages = []

    def run(name: str):
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.set_default_timeout(ANSWER)
        pages.append(page)
        page.goto(lab(name))
        page.wait_for_function(
            "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel"
        )
        page.evaluate("window.jupyterapp.restored")
        finished = page.evaluate("window.jupyterapp.commands.execute('notebook:run-all-cells')")
        errors = page.locator("[data-mime-type='application/vnd.jupyter.error']")
        assert errors.count() == 0, errors.first.inner_text()
        assert finished is not False
        return page

    yield run
    for page in pages:
        page.close()


def keep(seen, name: str) -> None:
    """A screenshot of a part of the page, where they are asked for."""
    folder = os.environ.get("JAXSPEC_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        seen.screenshot(path=Path(folder) / f"{name}.png")


def drag(page, slider, share: float) -> None:
    """Moves the handle of a slider to a share of its length, as a hand would."""
    slider.scroll_into_view_if_needed()
    handle, track = (
        slider.locator(part).bounding_box() for part in (".noUi-handle", ".noUi-target")
    )
    page.mouse.move(handle["x"] + handle["width"] / 2, handle["y"] + handle["height"] / 2)
    page.mouse.down()
    page.mouse.move(track["x"] + share * track["width"], track["y"] + track["height"] / 2, steps=5)
    page.mouse.up()


@pytest.mark.parametrize(
    ("name", "moves", "presses"),
    [
        (
            "why_it_is_exact",
            {"p cat": 0.9, "q the": 0.7, "power of 10": 1.0},
            ("step", "run 1,000", "reset", "run 5,000"),
        ),
        ("seeds", {"alpha": 0.9, "gamma": 0.2, "c": 0.8, "check": 0.5}, ()),
    ],
)
def test_a_slider_or_a_button_changes_the_picture(run, name, moves, presses):
    page = run(name)
    for words in presses:
        named = page.get_by_role("button", name=words, exact=True)
        cell = page.locator(".jp-CodeCell").filter(has=named).first  # two widgets have a "reset"
        button = cell.get_by_role("button", name=words, exact=True)
        before = cell.locator("img").get_attribute("src")
        button.click()
        playwright.expect(cell.locator("img")).not_to_have_attribute("src", before, timeout=ANSWER)
        keep(cell, f"{name}-{words}".replace(" ", "-"))
    for label, share in moves.items():
        named = page.locator(".widget-label", has_text=re.compile(f"^{label}$"))
        slider = page.locator(".widget-slider").filter(has=named)
        cell = page.locator(".jp-CodeCell").filter(has=slider)
        picture, value = cell.locator("img"), slider.locator(".widget-readout").inner_text()
        picture.scroll_into_view_if_needed()
        before, shot = picture.get_attribute("src"), f"{name}-{label}".replace(" ", "-")
        keep(cell, f"{shot}-before")
        drag(page, slider, share)
        playwright.expect(picture).not_to_have_attribute("src", before, timeout=ANSWER)
        assert slider.locator(".widget-readout").inner_text() != value
        assert before.startswith("data:image/png") and picture.count() == 1
        keep(cell, f"{shot}-after")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_without_a_kernel(browser, scheme: str):
    """Keys move its sliders, a click moves the dot, buttons draw tokens; nothing else is loaded or
    logged.
    """
    page = browser.new_page(viewport={"width": 900, "height": 1000}, color_scheme=scheme)
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: said.append(request.url))
    page.goto(WIDGETS_PAGE.as_uri())
    shown = lambda widget, name: page.locator(f"#{widget} [data-show={name}]").inner_text()  # noqa: E731
    assert [shown("landscape", name) for name in ("tokens", "cost", "speed", "best")] == [
        "2.94",
        "2.00",
        "1.47×",
        "3 (1.58×)",
    ]
    page.get_by_label("K, draft tokens a round").press("ArrowLeft")
    assert (shown("landscape", "tokens"), shown("landscape", "cost")) == ("2.77", "1.80")
    page.locator("#landscape svg").click(position={"x": 100, "y": 100})
    assert page.get_by_label("acceptance rate").input_value() < "0.2"
    for name, samples in {"step": "1", "run": "1,001", "reset": "0"}.items():
        page.locator(f"#residual [name={name}]").click()
        assert shown("residual", "samples") == samples
    page.get_by_label("how alike p and q are").press("End")
    assert shown("residual", "Z") == "0.000"
    page.locator("#unbiased [name=run]").click()
    assert shown("unbiased", "rounds") == "5,000" and float(shown("unbiased", "L1")) < 0.1
    assert said == [WIDGETS_PAGE.as_uri()]
    keep(page, f"page-{scheme}")
    page.close()


def test_a_generation_shows_itself(run):
    """Its text, and after a click every round, with accepted draft tokens in green and the rejected
    one struck through.
    """
    page = run("quickstart")
    shown = page.locator(".jp-RenderedHTMLCommon").filter(has=page.locator("details")).first
    shown.scroll_into_view_if_needed()
    rounds = shown.locator("details").last
    rounds.locator("summary").click()
    for name, (colour, line) in SEEN.items():
        mark = rounds.get_by_text(name, exact=True)
        assert mark.evaluate("it => getComputedStyle(it).color") == colour
        assert mark.evaluate("it => getComputedStyle(it).textDecorationLine") == line
    keep(shown, "quickstart-generation")
