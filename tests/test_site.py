"The site, built once and driven in headless Chromium: from the disk, and from below a path of a server"
import json, os, re, shutil, subprocess, sys, threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit
import pytest
pytest.importorskip('zensical', reason='The site needs Zensical, and that Python 3.11')
from nbdev.config import get_config
import docs, pages

root = Path(__file__).resolve().parent.parent

@pytest.fixture(scope='session')
def project(tmp_path_factory):
    "The folder of a project whose site is built"
    where = tmp_path_factory.mktemp('site')/'below'/'fastaccum'
    for d in ('bench', 'nbs', 'tools', 'fastaccum'): shutil.copytree(root/d, where/d, ignore=shutil.ignore_patterns('__pycache__', 'models'))
    for f in root.iterdir():
        if f.is_file(): shutil.copy(f, where)
    env = {**os.environ, 'PYTHONPATH': str(where), 'PYTHONWARNINGS': 'ignore'}
    res = subprocess.run([sys.executable, 'tools/docs.py'], cwd=where, env=env, capture_output=True, text=True, timeout=300)
    assert res.returncode==0, res.stdout + res.stderr
    return where

@pytest.fixture(scope='session')
def site(project): return project/'_docs'

# -- Without a browser -------------------------------------------------------------------------------------------
def paths(site): return sorted(f.relative_to(site).as_posix() for f in site.rglob('*.html') if f.name!='404.html')

def test_pages(site):
    "Each notebook has a page that the menu leads to, in HTML and markdown"
    assert {'index.html', 'changelog.html', 'api/accumulation.html', 'api/accumulator.html'} <= set(paths(site))
    menu = re.search(r'(?s)<nav class="md-nav md-nav--primary".*?</nav>\s*</div>', (site/'index.html').read_text())[0]
    llms = (site/'llms.txt').read_text()
    for p in paths(site):
        assert f'/{p}"' in menu or f'"{p}"' in menu or p=='index.html', p
        assert (site/p).with_suffix('.html.md').exists(), p
        assert f'/{p}.md)' in llms or p in ('changelog.html', 'contributing.html'), p

def test_public_symbols(site):
    "Every public symbol: signature, parameters, link to its source"
    from fastaccum import all as users
    text = ''.join(f.read_text() for f in (site/'api').glob('*.html'))
    for name in users.__all__:
        about = re.search(rf'(?s)<h3 class="api[^>]*id="{name.lower()}".*?(?=<h[23]|$)', text)
        assert about, name
        assert '<div class="highlight' in about[0] or '<th>Value</th>' in about[0], name
        assert re.search(r'href="https://github.com/[^"]*/fastaccum/\w+\.py#L\d+"', about[0]), name
        assert '<table' in about[0], name

def test_formulas(site):
    text = (site/'api/accumulator.html').read_text()
    assert '<math' in text and 'arithmatex' not in text

def test_loads_nothing_from_elsewhere(site):
    for p in paths(site):
        loads = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"|<link rel="(?!canonical)[^>]*href="([^"]+)"', (site/p).read_text())
        assert not [o for o in map(''.join, loads) if urlsplit(o).netloc], p

@pytest.mark.parametrize('text,complaint', [
    ('a [link](nowhere.md)', 'page does not exist'), ('a [link](api/accumulator.md#no-such-place)', 'anchor does not exist'), ('<a href="nowhere.html">link</a>', 'nowhere'),
    ('<a href="https://example.org/a.html">link</a>', 'page of the site'), ('![picture](images/none.png)', 'none.png'),
    ('<img src="https://elsewhere.org/a.png">', 'another host')])
def test_wrong_links_fail(project, tmp_path, capfd, text, complaint):
    md = tmp_path/'_md'
    shutil.copytree(project/'_md', md)
    for f in (md/'docs').rglob('*.md'):
        if f.parent.name!='api': f.write_text('# Title\n\n' + text*(f.name=='index.md'))
    wrong = []
    try: wrong = docs.wrong_links(docs.build(md).resolve(), 'https://example.org')
    except subprocess.CalledProcessError: pass
    assert complaint in ''.join(capfd.readouterr()) + '\n'.join(wrong)

@pytest.mark.parametrize('to,expected', [
    ('api/10_accumulation.ipynb#x', 'api/accumulation.md#x'), ('images/demo.png', 'images/demo.png'), ('#here', '#here'),
    ('../LICENSE', 'https://github.com/fastaccum/fastaccum/blob/main/LICENSE'), ('https://x.org/a.html', 'https://x.org/a.html'),
    ('https://fastaccum.github.io/fastaccum/api/accumulator.html', 'api/accumulator.md'), ('no.ipynb', 'no.ipynb'),
    ('../CHANGELOG.md#x', 'changelog.md#x'), ('../README.md', 'https://github.com/fastaccum/fastaccum/blob/main/README.md')])
def test_links(to, expected):
    cfg = get_config(root)
    assert pages.linked(f'a [link]({to}), `[code]({to})`', 'index.ipynb', cfg)==f'a [link]({expected}), `[code]({to})`'
    if expected[:4]=='api/': assert pages.relative(f'../{to}' if to[0]=='a' else to, 'tutorials/x.ipynb', cfg)==f'../{expected}'

def test_links_of_plain_pages():
    cfg = get_config(root)
    assert pages.linked('[a](nbs/api/10_accumulation.ipynb) [b](CHANGELOG.md) [c](LICENSE)', '../CONTRIBUTING.md', cfg)==(
        '[a](api/accumulation.md) [b](changelog.md) [c](https://github.com/fastaccum/fastaccum/blob/main/LICENSE)')

def test_links_in_links():
    "nbdev makes links of code also where there is one, and in headings"
    cfg,auto = get_config(root),'[`Learner`](https://docs.fast.ai/learner.html#learner)'
    for text,expected in [(f'# The {auto}', '# The `Learner`'), (f'a [the {auto} page](https://x.org) b', 'a [the `Learner` page](https://x.org) b'),
                          (f'{auto} (and {auto})', f'{auto} (and {auto})'), (f'[{auto}](#here)', '[`Learner`](#here)')]:
        assert pages.linked(text, 'index.ipynb', cfg)==expected

def test_menu():
    paths = ['api/b.md', 'api/a.md', 'benchmarks.md', 'changelog.md', 'index.md', 'new.md', 'tutorials/new.md', 'tutorials/wandb.md']
    assert docs.navigation({p: p.upper() for p in paths})==[
        {'Home': 'index.md'}, {'Tutorials': [{'TUTORIALS/WANDB.MD': 'tutorials/wandb.md'}, {'TUTORIALS/NEW.MD': 'tutorials/new.md'}]},
        {'API reference': [{'API/B.MD': 'api/b.md'}, {'API/A.MD': 'api/a.md'}]}, {'Benchmarks': 'benchmarks.md'}, {'NEW.MD': 'new.md'},
        {'Changelog': 'changelog.md'}]

@pytest.mark.parametrize('text,expected', [
    (':::{.callout-note}\n## Head\n\nText\n:::', '!!! note "Head"\n\n    Text'), (':::{.callout-tip}\nText\n\nmore\n:::', '!!! tip\n\n    Text\n\n    more')])
def test_callouts(text, expected): assert pages.callouts(text)==expected

# -- In a browser ------------------------------------------------------------------------------------------------
flags = ('--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking '
         '--disable-component-update --disable-sync --window-size=1400,1000 --allow-file-access-from-files=false')

@pytest.fixture(scope='session')
def browser(tmp_path_factory):
    binary,driver = shutil.which('chromium') or shutil.which('google-chrome'),shutil.which('chromedriver')
    if not binary or not driver: pytest.skip('No browser: the tests of the site need chromium and chromedriver')
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in [*flags.split(), f'--user-data-dir={tmp_path_factory.mktemp("chromium")}']: options.add_argument(flag)
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL', 'performance': 'ALL'})
    driver = webdriver.Chrome(options, Service(driver))
    driver.implicitly_wait(5)
    yield driver
    driver.quit()

class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args): pass

@pytest.fixture(scope='session', params=['disk', 'server'])
def base(request, site):
    "Address of the site, without the last slash"
    if request.param=='disk': yield site.as_uri(); return
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=site.parent.parent))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/{site.parent.name}/{site.name}'
    server.shutdown()

def wait(browser, script, *args):
    "Wait until the JavaScript expression is true; returns its value"
    from selenium.webdriver.support.ui import WebDriverWait
    return WebDriverWait(browser, 10).until(lambda b: b.execute_script(f'return {script}', *args), script)

def requests(browser):
    msgs = [json.loads(e['message'])['message'] for e in browser.get_log('performance')]
    return [m['params']['request']['url'] for m in msgs if m['method']=='Network.requestWillBeSent']

def test_all_pages(browser, base, site):
    "No errors in the console, all pictures are there, nothing is asked of another host"
    browser.get_log('browser'), requests(browser)
    for p in paths(site):
        browser.get(f'{base}/{p}')
        assert wait(browser, 'document.readyState=="complete" && document.querySelector("h1").innerText'), p
        broken = browser.execute_script('return [...document.images].filter(i => !i.naturalWidth).map(i => i.src)')
        assert broken==[], p
    assert browser.get_log('browser')==[]
    asked = requests(browser)
    assert len(asked) > len(paths(site))
    assert [u for u in asked if not u.startswith((base, 'data:', 'blob:', 'about:', 'chrome:'))]==[]

def test_narrow(browser, site):
    "On a phone nothing but code and tables scrolls sideways"
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', dict(width=400, height=800, deviceScaleFactor=1, mobile=True))
    try:
        for p in paths(site):
            browser.get(f'{site.as_uri()}/{p}')
            assert browser.execute_script('return document.documentElement.scrollWidth')==400, p
    finally: browser.execute_cdp_cmd('Emulation.clearDeviceMetricsOverride', {})

def test_search(browser, base):
    browser.get(f'{base}/index.html')
    wait(browser, 'document.querySelector(".md-search__button")').click()
    frame = '[...document.querySelectorAll("*")].find(e => e.shadowRoot).shadowRoot'
    wait(browser, f'{frame}.querySelector("input")').send_keys('GradientAccumulationSchedule')
    hit = wait(browser, f'{frame}.querySelector("a[role=option]")')
    assert 'GradientAccumulationSchedule' in hit.text
    hit.click()
    wait(browser, 'location.href.includes("api/accumulation.html") && location.hash=="#gradientaccumulationschedule"')
    assert browser.current_url.startswith(base)

def test_parameters(browser, base):
    browser.get(f'{base}/api/accumulation.html#gradientaccumulationschedule')
    shown = wait(browser, '''[...document.querySelectorAll("table")].filter(t => t.offsetHeight && t.innerText.includes("start_accum_bs") && t.innerText.includes("final_accum_bs")).length''')
    assert shown

def test_dark_mode(browser, base):
    browser.get(f'{base}/api/accumulation.html')
    look = 'getComputedStyle(document.body).backgroundColor'
    bright = lambda: sum(map(int, re.findall(r'\d+', browser.execute_script(f'return {look}'))[:3]))
    first = bright()
    browser.execute_script('[...document.querySelectorAll("label[for^=__palette]")].find(l => !l.hidden).click()')
    wait(browser, f'{look} != arguments[0]', browser.execute_script('return ""'))
    assert abs(bright() - first) > 400
    assert set(browser.execute_script('return [...document.querySelectorAll("article img")].map(i => getComputedStyle(i).backgroundColor)'))=={'rgb(255, 255, 255)'}
