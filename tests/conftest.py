"Settings for all tests: one thread (models are tiny), no windows, and what training saves goes to a temporary folder"
import signal
import matplotlib, pytest, torch
matplotlib.use('Agg')
torch.set_num_threads(1)

@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch): monkeypatch.chdir(tmp_path)

# a shell that starts the tests in the background has Ctrl-C ignored, and children inherit that
signal.signal(signal.SIGINT, signal.default_int_handler)
