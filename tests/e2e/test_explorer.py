"""Test `sparo slots explore` in a real browser: clicks and keys, and whether scores equal those of `sparo eval --slots`."""

import base64
import json
import socket
import time
from urllib.parse import urlsplit

import pytest

from tests.helpers.browser import Watched, chromium, explorer, proxy, until
from tests.helpers.processes import sparo
from tests.helpers.samples import jpeg

TASKS = "zero,ret,pairs,knn"


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def shown(page):
    """Return task: (all, chosen, change) from the table."""
    rows = page.evaluate(
        "[...document.querySelectorAll('#scores tbody tr')].map(r => [r.dataset.task, ...[...r.querySelectorAll('.value')].map(v => v.textContent)])"
    )
    return {task: tuple(values) for task, *values in rows}


def scored(world, checkpoint, *words):
    done = sparo("eval", checkpoint, *words, "--tasks", TASKS, "--data", "tasks.yaml", "--features", "store", "--no-write-to-run",
                 "--json", "explored.json", cwd=world)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((world / "explored.json").read_text())["results"].items()
    return {name.rpartition("/")[2]: r for name, r in found}


def says(page, selector, text):
    until(page.locator(selector)).to_contain_text(text, timeout=20_000)


def counts(page, selector, number):
    until(page.locator(selector)).to_have_count(number, timeout=20_000)


def press(page, selector, *keys):
    page.locator(selector).focus()
    for key in keys:
        page.keyboard.press(key)


def test_keyboard_selections_have_the_scores_of_eval(world, browser):
    with explorer("runs/s0", "--data", "tasks.yaml", "--out", "switched.json", cwd=world) as address:
        seen = Watched(browser, address)
        page = seen.page
        whole = scored(world, "runs/s0")
        tasks = [name for name in shown(page) if name in whole]
        assert set(tasks) == set(TASKS.split(","))
        headline = {name: r["headline"] for name, r in whole.items()}
        on = {0, 1, 2, 3}
        # Arrows move the focus, Space switches a slot: 0 off; 0 and 2 off; 2 on and 0 off …
        for keys, now in (
            ((" ",), {1, 2, 3}),
            (("ArrowRight", "ArrowRight", " "), {1, 3}),
            (("Home", "End", " "), {1}),
        ):
            if on == {0, 1, 2, 3}:
                page.locator("#slots [data-slot='0']").focus()
            for key in keys:
                page.keyboard.press(key)
            on = now
            found = scored(world, "runs/s0", "--slots", ",".join(map(str, sorted(on))))
            for name in tasks:
                value = 100 * found[name]["metrics"][headline[name]]
                assert shown(page)[name][1] == f"{value:.1f}", (name, on)
                assert shown(page)[name][0] == f"{100 * whole[name]['metrics'][headline[name]]:.1f}"
            assert f"{len(on)} of 4 slots are on" in page.inner_text(
                "#share"
            ) and "was made on the data of" in page.inner_text("#share")
        page.click("#none")
        assert set(shown(page).values()) == {(shown(page)[t][0], "–", "–") for t in shown(page)}
        assert page.locator("#save").is_disabled()
        page.click("#all")
        assert all(all_ == chosen and gain == "0.0" for all_, chosen, gain in shown(page).values())
        page.fill("#top-k", "2")
        page.select_option("#top-task", label="zero")
        page.click("#top button")
        says(page, "#status", "The 2 best alone")
        done = sparo(
            "slots",
            "score",
            "runs/s0",
            "--tasks",
            "zero",
            "--data",
            "tasks.yaml",
            "--features",
            "store",
            "--json",
            "alone.json",
            cwd=world,
        )
        assert done.returncode == 0, done.stderr
        alone = json.loads((world / "alone.json").read_text())["scores"]["zero alone"]
        best = sorted(sorted(range(4), key=lambda slot: (-alone[slot], slot))[:2])
        assert (
            page.eval_on_selector_all("#slots [aria-selected=true]", "all => all.map(b => Number(b.dataset.slot))")
            == best
        )
        seen.fine()


def switches_back_and_forth(page):
    """Undo and redo work by keyboard and by button; the bar shows the change relative to all slots."""
    before, bar = shown(page), page.inner_text("#score-bar")
    assert page.locator("#undo").is_disabled() and " to " not in bar
    press(page, "#slots [data-slot='1']", "Space")
    off = shown(page)
    for row in page.locator("#score-bar li").all():
        task = row.locator(".task").inner_text().partition(" (")[0]
        assert row.locator("strong").inner_text() == off[task][1] and off[task][2] in row.inner_text()
        low, high = (float(n.replace("−", "-")) for n in row.locator(".interval").inner_text()[1:-1].split(" to "))
        change = "better" if low > 0 else "worse" if high < 0 else ""
        assert abs(low * high) < 1e-6 or row.get_attribute("class") == change
    page.keyboard.press("Control+z")
    says(page, "#status", "Undone: slot 1.")
    assert shown(page) == before and page.inner_text("#score-bar") == bar and page.locator("#undo").is_disabled()
    page.click("#redo")
    assert shown(page) == off
    page.click("#undo")
    page.keyboard.press("?")
    page.wait_for_selector("#shortcuts[open]")
    page.keyboard.press("Escape")
    assert page.locator("#shortcuts").is_hidden()


def takes_the_tour(page):
    """The tour starts at the first visit only, marks what it explains, and can be ended."""
    for number in (1, 2, 3, 4):
        assert page.inner_text("#tour-title") == f"Tour, {number} of 4"
        assert page.locator(".tour-target").count() == 1
        page.click("#next-step")
    assert page.locator("#tour").is_hidden() and page.locator(".tour-target").count() == 0


def adds_an_image(page, tmp_path):
    """Upload a file that is no image, then an image whose caption contains a script, then captions for it."""
    page.set_input_files("#own-image", tmp_path / "no.jpg")
    page.click("#own button")
    page.wait_for_selector("#error:visible")
    assert "no.jpg" in page.inner_text("#error-text") and page.locator("#images [role=option]").count() == 12
    page.click("#error button")
    page.set_input_files("#own-image", tmp_path / "own.jpg")
    page.fill("#own-caption", "<script>alert(1)</script>")
    page.click("#own button")
    counts(page, "#images [role=option]", 13)
    says(page, "#picture-words", "<script>alert(1)</script>")
    page.fill("#captions-text", "a red square\na blue circle\n")
    page.click("#captions button")
    page.wait_for_selector("#captions-found table")
    assert (
        page.locator("#captions-found tbody tr").count() == 2 and page.inner_text("#captions-found").count("best") == 2
    )


def saves_from_two_tabs(seen, address, world):
    """Two users who save at the same time lose nothing, and both buttons of the dialog work."""
    page = seen.page
    other = seen.tab()  # two tabs, both of which save
    seen.go(address, other)
    press(other, "#slots [data-slot='1']", "Space", "Control+s")
    says(other, "#status", "Saved")
    press(page, "#slots [data-slot='3']", "Space", "Control+s")
    page.wait_for_selector("#error:visible")
    assert "by_hand.json: was changed by another tab or program" in page.inner_text("#error-text")
    assert json.loads((world / "by_hand.json").read_text())["chosen"] == [2, 3]
    seen.fine()
    page.click("#error button:has-text('Write over it')")
    says(page, "#status", "Saved")
    assert json.loads((world / "by_hand.json").read_text())["chosen"] == [1, 2]
    press(other, "#slots [data-slot='0']", "Space", "Control+s")
    other.wait_for_selector("#error:visible")
    other.click("#error button:has-text('Read it again')")
    says(other, "#status", "was read again")
    assert other.eval_on_selector_all("#slots [aria-selected=true]", "all => all.map(b => b.dataset.slot)") == [
        "1",
        "2",
    ]
    other.close()
    seen.fine()


@pytest.mark.long
def test_a_session_of_a_user(world, browser, tmp_path):
    (tmp_path / "own.jpg").write_bytes(jpeg(7, (60, 40)))
    (tmp_path / "no.jpg").write_bytes(b"no image")
    with explorer("runs/s0", "--data", "tasks.yaml", "--out", "by_hand.json", "--task", "ret", cwd=world) as address:
        seen = Watched(browser, address, accept_downloads=True)
        page = seen.page
        assert page.locator("#images [role=option]").count() == 12 and page.locator("#slots canvas").count() == 4
        says(page, "#picture-words", "“a thing 0”")  # is loaded after the first paint
        takes_the_tour(page)
        switches_back_and_forth(page)
        caption = page.inner_text("#large-caption")
        page.locator("#slots [data-slot='3']").hover()  # shown while the mouse is over it
        says(page, "#large-title", "Slot 3: at most")
        page.locator("#title").hover()
        says(page, "#large-title", "Slot 1: at most")
        page.click("#alike button")
        counts(page, "#alike-found button", 8)
        assert "in the others" in page.locator("#alike-found img").first.get_attribute("alt")
        page.locator("#alike-found button").first.click()
        page.wait_for_selector("#alike-found button", state="detached")
        assert page.locator("#images [aria-selected=true]").get_attribute("data-image") != "0"
        page.locator("#images [data-image='0']").click()
        says(page, "#picture-words", "“a thing 0”")
        assert caption == page.inner_text("#large-caption") == "a thing 0"

        press(page, "#slots [data-slot='2']", "n")
        page.keyboard.type("<img src=x onerror=alert(1)>")
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.dataset.slot") == "2"
        page.fill("#note", "looks at red")
        press(page, "#slots [data-slot='2']", "/")
        assert page.input_value("#search-by") == "text"
        page.select_option("#search-by", "name")
        page.locator("#query").focus()
        page.keyboard.type("RED")
        page.keyboard.press("Enter")
        assert "1 of 4 slots have “RED” in their name or note" in page.inner_text("#status")
        assert page.locator("#slots [role=option]:visible").count() == 1
        page.select_option("#search-by", "text")
        page.press("#query", "Enter")
        says(page, "#status", "fits “RED” best")
        (winner,) = page.eval_on_selector_all("#slots [role=option]:first-child", "all => all.map(b => b.dataset.slot)")
        assert page.inner_text("#slot-title") == f"Slot {winner}" and "(uniform: 25.0 %)" in page.inner_text("#status")
        assert page.locator("#slots [role=option]:visible").count() == 4
        parts = page.eval_on_selector_all("#slots .fact", "all => all.map(f => parseFloat(f.textContent))")
        assert parts == sorted(parts, reverse=True) and sum(parts) == pytest.approx(100, abs=0.3)
        page.click("#clear")

        adds_an_image(page, tmp_path)
        press(page, "#slots [data-slot='0']", "Space")
        before = shown(page)
        page.reload()  # nothing was saved and nothing is lost
        page.wait_for_selector("body[data-ready=yes]")
        assert page.locator("#tour").is_hidden()
        assert shown(page) == before and "Unsaved changes" in page.inner_text("#status")
        page.keyboard.press("Control+s")
        says(page, "#status", "Saved to by_hand.json: 3 of 4")
        saved = json.loads((world / "by_hand.json").read_text())
        assert saved["chosen"] == [1, 2, 3] and saved["notes"] == {"2": "looks at red"} and saved["method"] == "hand"
        assert saved["names"] == {"2": "<img src=x onerror=alert(1)>"} and saved["looked_at"]
        found = scored(world, "runs/s0", "--slots", "by_hand.json")
        assert before["ret"][1] == f"{100 * found['ret']['metrics'][found['ret']['headline']]:.1f}"
        done = sparo("slots", "select", "runs/s0", "--task", "zero", "--report-tasks", "zero", "--slots", "by_hand.json", "--out", "again_by_hand.json",
                     "--data", "tasks.yaml", "--features", "store", "--same-data", cwd=world)  # fmt: skip
        assert "same data" in done.stdout  # the page showed this score when the selection was saved

        saves_from_two_tabs(seen, address, world)


@pytest.mark.long
def test_two_checkpoints_and_one_file(others, browser, tmp_path):
    world = others
    with explorer("runs/s0", "--data", "tasks.yaml", "--out", "two.json", cwd=world) as address:
        seen = Watched(browser, address, accept_downloads=True)
        page = seen.page
        runs = page.eval_on_selector_all("#runs option", "all => all.map(o => o.value)")
        assert "runs/s1" in runs and "runs/s0" not in runs
        for name, told in (
            ("runs/s9", "runs/s9"),
            ("runs/s0", "has the same weights as the checkpoint that is already open"),
        ):
            page.fill("#compare-with", name)
            page.press("#compare-with", "Enter")
            says(page, "#error-text", told)
            page.click("#error button")
        page.fill("#compare-with", "runs/s1")
        page.press("#compare-with", "Enter")
        counts(page, "#scores tr[data-task=knn] .value", 6)
        ours, theirs = scored(world, "runs/s0"), scored(world, "runs/s1")
        for name, r in ours.items():
            row = shown(page)[name]
            assert (row[0], row[3]) == tuple(f"{100 * of['metrics'][r['headline']]:.1f}" for of in (r, theirs[name]))
        assert page.locator("#sides input:checked").get_attribute("value") == "1"
        press(page, "#slots [data-slot='1']", "Space")  # switches a slot of the second model only
        assert shown(page)["ret"][1] == shown(page)["ret"][0]
        page.keyboard.press("Control+s")
        says(page, "#status", "Saved to two_")
        (file,) = world.glob("two_*.json")
        assert json.loads(file.read_text())["chosen"] == [0, 2, 3] and not (world / "two.json").exists()
        page.locator("#sides input").first.check()
        press(page, "#slots [data-slot='2']", "n")
        page.keyboard.type("</script><script>alert(1)</script>")
        with page.expect_download() as got:
            page.click("#one-file")
        got.value.save_as(tmp_path / "one.html")
        before = shown(page)
        seen.fine()
        plain = seen.tab()  # a model without slots is divided into equal parts and has no attention
        seen.go(address, plain)
        plain.fill("#compare-with", "runs/plain")
        plain.press("#compare-with", "Enter")
        says(plain, "#picture-words", "have no attention")
    whole = Watched(browser, (tmp_path / "one.html").as_uri(), accept_downloads=True, offline=True)
    page = whole.page  # the server has stopped
    assert (
        shown(page) == before and page.locator("#own").is_hidden() and page.locator("#slots canvas").first.is_visible()
    )
    page.locator("#sides input").first.check()
    assert "</script><script>" in page.inner_text("#slots [data-slot='2']")
    press(page, "#slots [data-slot='0']", "Space")
    found = scored(world, "runs/s0", "--slots", "1,2,3")
    assert shown(page)["ret"][1] == f"{100 * found['ret']['metrics'][found['ret']['headline']]:.1f}"
    with page.expect_download() as got:
        page.keyboard.press("Control+s")
    got.value.save_as(world / "from_page.json")
    assert scored(world, "runs/s0", "--slots", "from_page.json")["ret"]["metrics"] == found["ret"]["metrics"]
    whole.fine()


def drop(page, kind, *paths):
    """Send a drop or paste event with files."""
    files = [(path.name, base64.b64encode(path.read_bytes()).decode()) for path in paths]
    page.evaluate(
        """([kind, files]) => {
            const data = new DataTransfer();
            for (const [name, text] of files) data.items.add(new File([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))], name, { type: "image/jpeg" }));
            const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
                : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
            document.body.dispatchEvent(event);
        }""",
        [kind, files],
    )


def test_the_explorer_works_through_a_proxy_with_uploaded_images(world, browser, tmp_path):
    for i in range(4):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(40 + i, (60, 40)))
    words = ("--data", "tasks.yaml", "--out", "proxied.json", "--allow-host", "hub.localhost")
    with explorer("runs/s0", *words, cwd=world) as address:
        assert "?token=" in address
        query, prefix = urlsplit(address).query, "/user/me/proxy/8765/"
        # JupyterHub keeps the browser's Host. A tunnel replaces it by the address of this machine, so it differs from Origin.
        for host in (None, urlsplit(address).netloc):
            with proxy(address, prefix, host) as port:
                seen = Watched(browser, f"http://hub.localhost:{port}{prefix}?{query}")
                page = seen.page
                assert page.url == f"http://hub.localhost:{port}{prefix}"
                before = page.locator("#images [role=option]").count()
                drop(page, "drop", tmp_path / "0.jpg", tmp_path / "1.jpg")
                counts(page, "#images [role=option]", before + 2)
                drop(page, "paste", tmp_path / "2.jpg")
                counts(page, "#images [role=option]", before + 3)
                page.set_input_files("#own-image", [tmp_path / "3.jpg", tmp_path / "0.jpg"])
                page.fill("#own-caption", "שלום")
                page.click("#own button")
                counts(page, "#images [role=option]", before + 5)
                first = page.locator("#images [role=option]").first
                assert "שלום" in first.inner_text() and first.locator("span").get_attribute("dir") == "auto"
                page.set_viewport_size({"width": 390, "height": 800})
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
                seen.fine()
                seen.context.close()


@pytest.mark.long
def test_late_replies_and_damaged_files_lose_nothing(world, browser):
    words = ("runs/s0", "--data", "tasks.yaml", "--compare", "runs/s1", "--out", "late.json", "--tasks", "zero,pairs")
    with explorer(*words, cwd=world) as address:
        seen = Watched(browser, address)
        page = seen.page
        press(page, "#slots [data-slot='0']", "Space")
        page.route("**/save/*", lambda route: (time.sleep(0.7), route.continue_()))
        page.keyboard.press("Control+s")
        page.fill("#note", "written while it was being saved")
        press(page, "#slots [data-slot='1']", "Space")
        says(page, "#status", "Saved to late.json: 3 of 4")
        assert json.loads((world / "late.json").read_text())["chosen"] == [1, 2, 3]
        assert page.eval_on_selector_all("#slots [aria-selected=true]", "all => all.map(b => b.dataset.slot)") == [
            "2",
            "3",
        ]
        page.reload()
        page.wait_for_selector("body[data-ready=yes]")
        says(page, "#status", "Unsaved changes")
        page.locator("#slots [data-slot='0']").focus()
        assert page.input_value("#note") == "written while it was being saved"

        saved = json.loads((world / "late.json").read_text())
        (world / "late.json").write_text(json.dumps({**saved, "names": {"3": "a colleague's"}}))
        page.keyboard.press("Control+s")
        page.wait_for_selector("#error:visible")
        page.locator("#sides input").nth(1).check()  # the answer belongs to the first model, whichever is displayed
        assert page.evaluate("document.activeElement.type") == "radio"
        page.click("#error button:has-text('Write over it')")
        says(page, "#status", "Saved to late.json: 2 of 4")
        assert (
            json.loads((world / "late.json").read_text())["chosen"] == [2, 3]
            and len(list(world.glob("late_*.json"))) == 0
        )
        assert page.locator("#slots [aria-selected=true]").count() == 4  # slots of the second model
        page.locator("#sides input").first.check()

        (world / "late.json").write_text("{broken")
        page.reload()
        page.wait_for_selector("body[data-ready=yes]")
        assert "late.json" in page.inner_text("#error-text")
        assert shown(page)["zero"][0] == f"{100 * scored(world, 'runs/s0')['zero']['metrics']['acc1']:.1f}"
        page.click("#error button:has-text('Write over it')")
        says(page, "#status", "Saved to late.json")
        seen.fine()
    page.locator("#images [data-image='5']").click()  # the server has stopped
    says(page, "#error-text", "The server does not answer")
    assert not page.inner_text("#picture-words")


def test_the_explorer_shows_a_model_without_text_tower(others, browser):
    with explorer(
        "runs/dino", "--data", "tasks.yaml", "--out", "dino_by_hand.json", "--limit", "20", cwd=others
    ) as address:
        seen = Watched(browser, address, viewport={"width": 650, "height": 450})  # equals 1,300 by 900 pixels at 200 %
        page = seen.page
        assert set(shown(page)) == {"knn"} and page.locator("#slots canvas").first.is_visible()
        assert page.locator("#search-by option").nth(0).is_disabled() and page.input_value("#search-by") == "name"
        assert page.locator("#search-by option").nth(0).is_disabled() and page.locator("#captions").is_hidden()
        assert "20 of 30 images" in page.inner_text("#score-bar")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # no horizontal scrolling
        seen.fine()


BAD = {
    "no slots": (("runs/plain",), "has no slots, or only one. Use a model with a readout"),
    "heads": (("runs/plain", "--units", "heads"), "Use `sparo slots select` to select heads"),
    "out": (("runs/s0", "--out", "x.yaml"), "--out x.yaml: expected a .json file"),
    "of another": (("runs/s1", "--out", "anothers.json"), "--out anothers.json: was made for another checkpoint"),
    "a mask": (("runs/s0", "--out", "a_mask.json"), "the existing file contains a mask"),
    "no selection": (("runs/s0", "--out", "spoilt.json"), "--out spoilt.json"),
    "nothing fits": (("runs/dino", "--tasks", "ret,pairs"), "supports none of"),
    "host": (("runs/s0", "--host", "203.0.113.9"), "--host 203.0.113.9"),
    "tasks": (("runs/s0", "--tasks", "zeor"), "did you mean 'zero'?"),
}


def test_bad_input_is_reported_before_a_page_is_served(others):
    selection = {"sparo": "selection", "schema": 1, "checkpoint": "0" * 64, "count": 4, "chosen": [0]}
    (others / "anothers.json").write_text(json.dumps(selection))
    (others / "spoilt.json").write_text('{"sparo": "selection", "chosen": [9]}')
    done = sparo("slots", "mask", "runs/s0", "--task", "pairs", "--report-tasks", "zero", "--out", "a_mask.json", "--data", "tasks.yaml", "--seeds", "1",
                 "--epochs", "2", cwd=others)  # fmt: skip
    assert done.returncode == 0, done.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        bad = {**BAD, "port": (("runs/s0", "--port", port), f"--port {port}: is in use on 127.0.0.1. Give another")}
        for name, (words, told) in bad.items():
            words = words if "--port" in words else (*words, "--port", "0")
            done = sparo("slots", "explore", *words, "--data", "tasks.yaml", "--features", "store", cwd=others)
            assert done.returncode == 2 and told in done.stderr.replace("\n", " "), (name, done.stderr)
            assert "Traceback" not in done.stderr and "http://" not in done.stdout
    assert json.loads((others / "anothers.json").read_text()) == selection
