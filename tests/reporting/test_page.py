"""The page in headless Chromium, at the widths of a desk and of a telephone."""

import os
import shutil

import pytest
from reporting.fakes import H200, result, rich_sweep, wide_sweep, write_sweep

from fusedmlp.reporting import report

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
if CHROMIUM is None:
    pytest.skip("there is no Chromium on PATH", allow_module_level=True)

WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A report on two machines, so that it has everything that one can have."""
    folder = tmp_path_factory.mktemp("report")
    first = rich_sweep(folder / "first")
    second = [result(impl, environment=H200 | {"gpu": "NVIDIA A100"}) for impl in ("native", "triton")]
    report.write([first, write_sweep(folder / "second", second)], folder)
    return (folder / "report.html").as_uri()


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in ("light", "dark")], ids=str)
def page(request, browser, address):
    """The page at a width and in a colour scheme, and that it said and asked for nothing."""
    width, scheme = request.param
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda wanted: asked.append(wanted.url))
    page.goto(address)
    if folder := os.environ.get("FUSEDMLP_SCREENSHOTS"):
        page.screenshot(path=f"{folder}/report-{width}-{scheme}.png", full_page=True)
    yield page
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [address]
    page.close()


def test_nothing_is_cut_off_or_invisible(page):
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
    plots = page.locator("figure svg")
    assert plots.count() == 7
    for plot in plots.all():
        box = plot.bounding_box()
        assert box["width"] > 300
        assert box["height"] > 150
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= page.viewport_size["width"]
    sizes = page.evaluate(
        """[...document.querySelectorAll("p, li, td, dd, svg text")].filter((e) => e.textContent.trim())
           .map((e) => {
             const scale = e.getScreenCTM ? e.getScreenCTM() : {a: 1, b: 0};
             return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(scale.a, scale.b);
           })"""
    )
    assert min(sizes) > 7.5, "px of the smallest text"
    # Text against the page, whatever the scheme: more than WCAG's 4.5 to 1.
    for selector in ("h1", ".note", "td", "td.bad", "figcaption", "figure svg text"):
        assert contrast(page, selector) > 4.5, selector


def contrast(page, selector: str) -> float:
    """WCAG 2's contrast ratio of a text and the page's background."""
    colors = page.evaluate(
        """(selector) => {
             const element = document.querySelector(selector), style = getComputedStyle(element);
             const text = element.closest("svg") ? style.fill : style.color;
             return [text, getComputedStyle(document.body).backgroundColor];
           }""",
        selector,
    )
    light = sorted(luminance([int(part) for part in color[4:-1].split(",")]) for color in colors)
    return (light[1] + 0.05) / (light[0] + 0.05)


def luminance(color: list[int]) -> float:
    linear = [c / 12.92 if (c := value / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for value in color]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_click_sorts_and_another_one_turns_it_round(page):
    table = page.locator("table.sortable", has_text="GPU busy").first
    impls = "bodies => bodies.map((body) => body.rows[0].cells[0].textContent)"

    def order() -> list[str]:
        return table.locator("tbody").evaluate_all(impls)

    assert order() == ["manual", "native", "compiled", "triton", "cuda"]
    head = table.get_by_role("button", name="ms/step")
    head.click()
    assert order() == ["triton", "compiled", "native", "manual", "cuda"], "as numbers, the empty one last"
    assert head.locator("..").get_attribute("aria-sort") == "ascending"
    head.click()
    assert order() == ["manual", "native", "compiled", "triton", "cuda"]
    table.get_by_role("button", name="impl").press("Enter")
    assert order() == ["compiled", "cuda", "manual", "native", "triton"]
    assert head.locator("..").get_attribute("aria-sort") is None


def test_what_a_row_is_about_stays_in_sight(page):
    scroll = page.locator(".scroll", has_text="GPU busy").first
    scroll.evaluate("element => element.scrollLeft = element.scrollWidth")
    left = scroll.bounding_box()["x"]
    assert scroll.locator("tbody td").first.bounding_box()["x"] == pytest.approx(left, abs=2)


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_tables_of_a_wide_sweep_fit_a_desk(browser, tmp_path, repeats):
    report.write([wide_sweep(tmp_path / "sweep", repeats)], tmp_path)
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((tmp_path / "report.html").as_uri())
    assert page.locator("th button").count() == 4 * 13, "every column but the one that stands beneath its row"
    page.get_by_role("button", name="times native").last.click()
    too_wide = "elements => elements.filter((e) => e.scrollWidth > e.clientWidth + 1).map((e) => e.textContent)"
    lines = "cells => cells.map((e) => Math.floor(e.clientHeight / parseFloat(getComputedStyle(e).lineHeight)))"
    for width in (1280, 1600):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.locator(".scroll, th, td, .below div").evaluate_all(too_wide) == []
        assert max(page.locator("tr:not(.below) > td").evaluate_all(lines)) <= 2
    page.close()


def test_a_reason_is_read_without_scrolling(page):
    """Where the numbers of its row are wider than the screen."""
    table = page.locator("table.sortable", has_text="nvcc").last
    reason = table.locator(".below div", has_text="nvcc")
    box = reason.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= page.viewport_size["width"]
    owner = reason.evaluate("element => element.closest('tbody').rows[0].cells[0].textContent")
    assert owner == "cuda"
    table.get_by_role("button", name="ms/step").click()
    assert reason.evaluate("element => element.closest('tbody').rows[0].cells[0].textContent") == "cuda"
    table.locator("..").evaluate("element => element.scrollLeft = element.scrollWidth")
    assert reason.bounding_box()["x"] == pytest.approx(box["x"], abs=2)
