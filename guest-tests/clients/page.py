"""The API and its page as others see them: schemathesis asks what its description allows and what it does not, and Chromium shows the page.

usage: page.py LAMINA MODEL.safetensors KV.safetensors

Where there is no Chromium that part says that it is skipped. LAMINA_SCREENSHOTS names a directory for pictures of the page.
"""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TENSORS = 10_000
VIEWERS = 10


class Device:
    """A device of its own, with the API on a port of loopback."""

    def __init__(self, lamina, folder, *options, port=0):
        words = ["serve", "--json", "--run-dir", f"{folder}/run", "--mount", f"{folder}/mount", "--tcp", f"127.0.0.1:{port}"]
        self.process = subprocess.Popen([lamina, *words, *options], stdout=subprocess.PIPE, text=True)
        ready = json.loads(self.process.stdout.readline())
        self.port = int(ready["tcp"].rsplit(":", 1)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method, path, body=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        assert answer.status < 300, (answer.status, data[:500])
        return json.loads(data) if data else None

    def seconds(self):
        """What the device's processes have taken of the processors."""
        ticks = 0
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for pid in [self.process.pid, *children]:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")


def check_api(lamina, folder):
    """Whatever is asked, what is answered is described, and what is wrong is refused with words."""
    with Device(lamina, folder, "--capacity", "64M", "--files", "4M") as device:
        device.ask("POST", "/tensors", {"name": "w", "length": 1 << 20, "format": "bf16"})
        # That the device failed, 500, is nowhere described.
        checks = "status_code_conformance,content_type_conformance,response_schema_conformance,negative_data_rejection"
        command = [Path(sys.executable).with_name("schemathesis"), "run", f"{device.url}/openapi.json", "--checks", checks]
        # Streams do not end.
        command += ["--exclude-path", "/live", "--exclude-path", "/trace", "--phases", "examples,coverage,fuzzing", "--max-examples", "40", "--seed", "1"]
        command += ["--request-timeout", "20", "--suppress-health-check", "all", "--no-color"]
        subprocess.run(command, cwd=folder, check=True)
        device.ask("GET", "/stats")


class Page:
    """What a page shows."""

    def __init__(self, page):
        self.page = page
        self.errors = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.errors.append(request.url) if "127.0.0.1" not in request.url else None)

    def text(self, where):
        return self.page.locator(where).inner_text()

    def until(self, where, pattern, seconds=20):
        end = time.monotonic() + seconds
        while not re.search(pattern, text := self.text(where)):
            assert time.monotonic() < end, (where, pattern, text[:2000])
            time.sleep(0.1)
        return text

    def picture(self, name):
        if folder := os.environ.get("LAMINA_SCREENSHOTS"):
            self.page.screenshot(path=f"{folder}/{name}.png", full_page=True)


def read_views(folder, device):
    """Reads every view through the mount."""
    with open(f"{folder}/mount/views", "rb", buffering=0) as views:
        for view in device.ask("GET", "/views"):
            os.posix_fadvise(views.fileno(), view["offset"], view["length"], os.POSIX_FADV_DONTNEED)
            os.pread(views.fileno(), view["length"], view["offset"])


def check_small(browser, lamina, folder, models):
    options = [word for model in models for word in ("--model", model)]
    options += ["--views", "full,e8m3,fp8_e4m3fn", "--observe", "--model-dram", "--image", f"{folder}/image"]
    with Device(lamina, folder, *options) as device:
        shown = Page(browser.new_page(viewport={"width": 1280, "height": 900}))
        shown.page.goto(device.url)
        shown.until("#state", r"^up \d+ s$")
        for _ in range(3):
            read_views(folder, device)
            time.sleep(1.1)
        shown.until("#views-live", r"e8m3 · \d+ tensors")
        assert "% of plain" in shown.text("#views-live") and "plain device would" in shown.text("#traffic")
        assert re.search(r"bf16: ratio 1\.\d+", shown.text("#formats")), shown.text("#formats")
        # A part for each plane of bf16, as it is and stored, and what is stored is shorter.
        bars = shown.page.locator(".format >> nth=0 >> .track")
        assert bars.nth(0).locator("i").count() == 16
        widths = [bar.evaluate("bar => [...bar.children].reduce((sum, part) => sum + part.offsetWidth, 0)") for bar in bars.all()]
        assert 0 < widths[1] < widths[0], widths
        assert shown.page.locator("#kv rect").count() >= 2, shown.text("#layers")
        assert shown.page.locator("#hottest .bar").count() > 0
        took = shown.until("#took", r"views, reads")
        assert re.search(r"views, reads[^,]*p50\s+p99\s+longest\s+[\d,]+ in all\s+[\d.]+ (ns|µs|ms)", took), took
        assert shown.page.locator("#took figure >> nth=0 >> rect").count() > 0
        # What DRAM would have done is told by the time that the model's thread has done it.
        modelled = shown.until("#modelled", r"plain\s+[\d.]+ \w+")
        assert "Modelled link" in modelled and re.search(r"trace\s+\d[\d,.]*\w* \(\d+\.\d %\)\s+[\d.]+ %", modelled), modelled
        assert "Modelled, not measured" in modelled and re.search(r"trace\s+[\d.]+ MiB \(\d+\.\d %\)", modelled), modelled
        metrics = http.client.HTTPConnection("127.0.0.1", device.port, timeout=60)
        metrics.request("GET", "/metrics")
        metrics = metrics.getresponse().read().decode()
        energy = {design: float(re.search(rf'lamina_modelled_access_picojoules_total{{design="{design}"}} (\S+)', metrics)[1]) for design in ("plain", "trace")}
        assert 0 < energy["trace"] < energy["plain"], energy
        assert "everybody" in shown.text("#exports") and "No block is poisoned" in shown.text("#poisoned")
        device.ask("POST", "/poison/inject", {"offset": 0, "length": 4096})
        shown.until("#poisoned", "injected")
        shown.page.locator("#counters summary").click()
        shown.until("#sections", "reads")
        # The planner is a page of the device's own.
        planner = Page(browser.new_page(viewport={"width": 1280, "height": 900}))
        planner.page.goto(device.url)
        planner.page.get_by_role("link", name="planner").click()
        planner.until("#points", "128 ?k|131,?072")
        before = planner.text("#points")
        planner.page.locator("[name=hbm]").evaluate("input => { input.value = 24; input.dispatchEvent(new Event('input', { bubbles: true })); }")
        assert planner.text("#points") != before and planner.page.locator("svg polyline").count() == 3
        assert not planner.errors, planner.errors
        planner.page.close()
        shown.picture("light")
        # By keys alone: a filter, and what is found by it.
        shown.page.keyboard.press("Escape")
        shown.page.keyboard.press("/")
        shown.page.keyboard.type("wq")
        assert re.search(r"1 to \d+ of \d+", shown.text("#tensors .tools"))
        assert all("wq" in name for name in shown.page.locator("#tensors tbody tr td:first-child").all_inner_texts())
        shown.page.keyboard.press("Escape")
        dark = Page(browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark"))
        dark.page.goto(device.url)
        dark.until("#state", "^up")
        dark.until("#formats", "bf16")
        wide = dark.page.evaluate("[document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor]")
        assert wide[0] <= 390 and wide[1] == "rgb(22, 24, 27)", wide
        # A bar beside each name has room, too.
        read_views(folder, device)
        dark.page.locator("#hottest .track i").first.wait_for()
        dark.picture("phone-dark")
        dark.page.close()
        shown.page.emulate_media(media="print")
        assert not shown.page.locator("nav").is_visible() and not shown.page.locator("#tensors input").is_visible()
        shown.picture("print")
        shown.page.emulate_media(media="screen")
        port = device.port
    shown.until("#state", "no answer from the device since .*; asking again")
    assert shown.page.locator("main").evaluate("main => getComputedStyle(main).opacity") != "1"
    shown.picture("lost")
    with Device(lamina, folder, *options, port=port):
        shown.until("#state", r"^up \d+ s; back after \d+ s$", 40)
        shown.until("#formats", "bf16")
    assert not shown.errors, shown.errors
    shown.page.close()


def check_pools(browser, lamina, folder):
    """A pool in files/ is shown with its classes and its nodes, as a node tells of it."""
    with Device(lamina, folder, "--capacity", "256M", "--views-capacity", "16M", "--views", "", "--files", "64M") as device:
        shown = Page(browser.new_page(viewport={"width": 1280, "height": 900}))
        shown.page.goto(device.url)
        shown.until("#state", "^up")
        assert not shown.page.locator("#pools").is_visible()
        pool = f"{folder}/mount/files/pool"
        run = lambda *words, **more: subprocess.run([lamina, "pool", *words], check=True, stdout=subprocess.DEVNULL, **more)
        run("create", pool, "--size", "32M")
        run("put", pool, "text", input=b"x" * 1_000_000)
        run("put", pool, "rows", "--kv", "64,32", input=b"\x12\x3f" * 500_000)
        run("get", pool, "text")
        os.sync()
        # What the table holds a node counts that stays for a while.
        serving = subprocess.Popen([lamina, "pool", "serve", pool], stdout=subprocess.DEVNULL)
        told = shown.until("#pooled", r"files/pool: hit rate 100(\.0)? %, 1\.9\d? MiB ready, of which the device stores", 40)
        assert re.search(r"bf16 64,32\s+976\.\d* KiB", shown.until("#pooled", "bf16 64,32")), told
        assert re.search(r"\d, manages\s+\d+ lamina", shown.until("#pooled", "manages")), shown.text("#pooled")
        assert shown.page.locator("#pooled .bar").count() == 2
        shown.picture("pools")
        serving.send_signal(signal.SIGTERM)
        serving.wait(60)
        os.unlink(pool)
        shown.page.locator("#pools").wait_for(state="hidden")
        assert not shown.errors, shown.errors
        shown.page.close()


def check_many(browser, lamina, folder):
    """The page is usable with many tensors, and costs the device little."""
    with Device(lamina, folder, "--capacity", "256M", "--views", "") as device:
        many = [{"name": f"model.layers.{n // 100}.part.{n % 100}", "length": 8192, "format": "bf16"} for n in range(TENSORS)]
        device.ask("POST", "/tensors", many)
        shown = Page(browser.new_page(viewport={"width": 1280, "height": 900}))
        shown.page.goto(device.url)
        shown.until("#tensors .tools", "1 to 50 of 10,000")
        assert shown.page.locator("#tensors tbody tr").count() == 50
        shown.page.get_by_role("button", name="next").first.click()
        shown.until("#tensors .tools", "51 to 100 of 10,000")
        shown.page.locator("#tensors input").fill("layers.99. part.7")
        shown.until("#tensors .tools", "1 to 11 of 11")
        shown.page.locator("#tensors th button", has_text="tensor").click()
        assert shown.page.locator("#tensors tbody td").first.inner_text() == "model.layers.99.part.79"
        arrow = "[document.querySelector('#tensors [aria-sort=descending] button'), '::after']"
        assert "↓" in shown.page.evaluate(f"getComputedStyle(...{arrow}).content")
        # Of most tensors the base is none, which is nothing that is looked for.
        shown.page.locator("#tensors input").fill("null")
        shown.until("#tensors .tools", "none")
        shown.page.locator("#tensors input").fill("")
        device.ask("POST", "/tensors", {"name": "derived", "length": 8192, "format": "bf16", "base": "model.layers.0.part.0"})
        shown.until("#tensors .tools", "of 10,001")
        by_base = shown.page.locator("#tensors th button", has_text="base")
        for first in "–", "model.layers.0.part.0":
            by_base.click()
            assert shown.page.locator("#tensors tbody tr").first.locator("td").nth(3).inner_text() == first
        # What was read of a view that goes is in no count any more: that is no rate.
        counts = [{"view": "gone", "reads": n, "bytes": n << 20, "stored": n << 19, "plain": None} for n in (1, 2)]
        counts.append({"view": "gone", "reads": 3, "bytes": 8192, "stored": 4096, "plain": None})
        script = "all => { all.forEach(row => keepTraffic({ seconds: 1, precisions: [row] })); return traffic.get('gone').ticks.map(tick => tick.bytes) }"
        assert shown.page.evaluate(script, counts) == [1 << 20]
        took = shown.page.evaluate("{ const begun = performance.now(); show(); performance.now() - begun }")
        assert took < 250, f"a tick takes {took} ms to show"
        # Others who look do nothing else.
        viewers = []
        for _ in range(VIEWERS - 1):
            viewer = http.client.HTTPConnection("127.0.0.1", device.port, timeout=60)
            viewer.request("GET", "/live")
            viewers.append((viewer, viewer.getresponse()))
        time.sleep(2)
        begun, before = time.monotonic(), device.seconds()
        while time.monotonic() - begun < 6:
            for _, answer in viewers:
                answer.read1(1 << 20)
        share = (device.seconds() - before) / (time.monotonic() - begun)
        print(f"page: {TENSORS} tensors and {VIEWERS} viewers take {100 * share:.1f} % of a core; a tick is shown in {took:.0f} ms")
        assert share < 0.05, share
        # A device that nobody observes says so in more words.
        phone = Page(browser.new_page(viewport={"width": 390, "height": 844}))
        phone.page.goto(device.url)
        phone.until("#state", "^up")
        phone.until("#tensors .tools", "of 10,000")
        wide = phone.page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390 and not phone.errors, (wide, phone.errors)
        phone.page.close()
        shown.picture("many")
        assert not shown.errors, shown.errors
        shown.page.close()


def check_report(browser, lamina, folder):
    """What `lamina reproduce` writes is one file that asks nobody, and can be read anywhere."""
    subprocess.run([lamina, "reproduce", "--out", folder, "--json"], stdout=subprocess.DEVNULL, check=True)
    report = json.loads(Path(folder, "report.json").read_text())
    asked, errors = [], []
    for name, width, scheme in ("report", 1280, "light"), ("report-dark", 1280, "dark"), ("report-phone", 390, "dark"):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"file://{folder}/report.html")
        wide, back, text = page.evaluate("""[document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor,
            getComputedStyle(document.querySelector('td')).color]""")
        assert wide <= width, (name, wide)
        assert (back, text) == (("rgb(255, 255, 255)", "rgb(27, 31, 36)") if scheme == "light" else ("rgb(22, 24, 27)", "rgb(228, 230, 233)"))
        assert page.locator("section").count() == len(report["sections"])
        assert page.locator("svg").count() == sum(len(section["charts"]) for section in report["sections"])
        # Every plot has something in it, inside its frame.
        for plot in page.locator("svg").all():
            marks, outside = plot.evaluate("""plot => { const box = plot.getBoundingClientRect();
                const marks = [...plot.querySelectorAll('.bar, .line, .dot, .mark')].map(mark => mark.getBoundingClientRect());
                return [marks.length, marks.filter(mark => mark.left < box.left - 1 || mark.right > box.right + 1 || mark.top < box.top - 1 || mark.bottom > box.bottom + 1).length]; }""")
            assert marks > 0 and outside == 0, (name, plot.get_attribute("aria-label"), marks, outside)
        page.get_by_role("link", name="Fig. 23").click()
        assert page.evaluate("location.hash") == "#trace-fig-23"
        Page(page).picture(name)
        if name == "report":
            page.emulate_media(media="print")
            assert not page.locator("nav").is_visible()
            Page(page).picture("report-print")
        page.close()
    assert all(url.startswith("file://") and url.split("#")[0].endswith("report.html") for url in asked), asked
    assert not errors, errors


def check_planner(browser, lamina, folder):
    """The page with sliders says what the program says."""
    path = f"{folder}/planner.html"
    subprocess.run([lamina, "model", "llama-3.1-70b", "--page", path], check=True)
    shown = Page(browser.new_page(viewport={"width": 1280, "height": 900}))
    shown.page.on("request", lambda request: None if request.url == f"file://{path}" else shown.errors.append(request.url))
    shown.page.goto(f"file://{path}")
    shown.errors.clear()

    def choose(name, value):
        shown.page.locator(f"[name={name}]").evaluate("(input, value) => { input.value = value; input.dispatchEvent(new Event('input', { bubbles: true })); }", str(value))

    def same(designs, where):
        script = "model(asked()).map(of => ({ ...of, points: of.points.map(point => ({ ...point, rate: Number.isFinite(point.rate) ? point.rate : null })) }))"
        for theirs, ours in zip(designs, shown.page.evaluate(script), strict=True):
            names = ("spills_at", "spills"), ("faster_than_plain_from", "faster"), ("longest_at_target", "longest")
            assert all(theirs[rust] == ours[script] for rust, script in names), (where, theirs, ours)
            assert abs(theirs["price_per_gb"] - ours["price"]) < 1e-5, (where, theirs, ours)
            for one, other in zip(theirs["points"], ours["points"], strict=True):
                rates = one["tokens_per_second"], other["rate"]
                assert rates[0] == rates[1] or abs(rates[0] / rates[1] - 1) < 1e-9, (where, one, other)
                assert (one["context"], one["bound"], one["devices"]) == (other["context"], other["bound"], other["devices"]), (where, one, other)

    for llm in "llama-3.1-70b", "gpt-oss-120b", "gpt-oss-120b-mxfp4", "deepseek-v3", "opt-30b":
        for accounting in "device-only", "as-printed":
            choose("shape", llm)
            choose("accounting", accounting)
            for change in ({}, {"hbm": 141, "alpha": 0.3, "batch": 3}, {"ddr": 900, "link": 100, "f_rd": 0.75, "target": 7.5, "device": 64}, {"ceiling": 40}):
                for name, value in change.items():
                    choose(name, value)
                of = shown.page.evaluate("asked()")
                words = [word for name in ("alpha", "batch") for word in (f"--{name}", str(of[name]))]
                words += [word for name in ("hbm", "ddr", "link", "device") for word in (f"--{name}", str(of[name] / 1e9))]
                words += ["--f-rd", str(of["f_rd"]), "--target", str(of["target"]), "--ratios", "printed" if accounting == "as-printed" else "paper"]
                words += ["--ceiling", str(of["ceiling"])] if of["ceiling"] else []
                told = subprocess.run([lamina, "model", llm, "--accounting", accounting, "--json", *words], stdout=subprocess.PIPE, check=True)
                same(json.loads(told.stdout)["reports"][0]["designs"], (llm, accounting, change))
    assert shown.page.locator("#points tr").count() == 8 and shown.page.locator("svg polyline").count() == 3
    shown.picture("planner")
    assert not shown.errors, shown.errors
    # What no slider has by itself is shown as a table has it.
    ratios = Path(folder, "ratios.json")
    ratios.write_text('{"trace": {"kv": 5.4321, "weights": 1.23456}}')
    odd = ["--hbm", "1128", "--batch", "512", "--device", "4099", "--alpha", "0.12345", "--f-rd", "0.001", "--ceiling", "777", "--target", "7.3"]
    odd += ["--context", "4k,128k", "--accounting", "as-printed", "--ratios", ratios, "--dram-price", "3", "--weight-bits", "4.1", "llama-3.1-405b"]
    told = subprocess.run([lamina, "model", "--json", *odd], stdout=subprocess.PIPE, check=True)
    subprocess.run([lamina, "model", "--page", path, *odd], check=True)
    shown.page.goto(f"file://{path}")
    same(json.loads(told.stdout)["reports"][0]["designs"], odd)
    assert shown.errors == [f"file://{path}"], shown.errors
    shown.page.close()


def main():
    lamina, *models = map(os.path.abspath, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        check_api(lamina, folder)
    print("page: schemathesis found nothing")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not chromium:
        print("page: skipped: there is no Chromium here (Debian's package chromium)")
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        with tempfile.TemporaryDirectory() as folder:
            check_small(browser, lamina, folder, models)
        with tempfile.TemporaryDirectory() as folder:
            check_many(browser, lamina, folder)
        with tempfile.TemporaryDirectory() as folder:
            check_pools(browser, lamina, folder)
        with tempfile.TemporaryDirectory() as folder:
            check_report(browser, lamina, folder)
            check_planner(browser, lamina, folder)
        browser.close()
    print("page: Chromium shows what there is")


main()
