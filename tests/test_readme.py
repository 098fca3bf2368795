"""What the README tells people to type works, and CI types it too."""

import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def command(name):
    (found,) = re.findall(
        rf"<!-- ci: {name} -->\n```bash\n(.*?)\n```", README, re.DOTALL
    )
    return found


def test_the_example_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "example.py").write_text(code)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    del environment["XLA_FLAGS"], environment["NPROC"]
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    norm, path = done.stdout.splitlines()
    assert float(norm) > 0
    assert path.startswith("echo on the xla backend")


def test_two_commands_set_everything_up():
    for name in ("train", "test"):
        assert command(name).startswith(
            "python3 -m venv .venv && .venv/bin/pip install"
        )
    assert command("train").endswith("echo-jax train")
    assert command("test").endswith("python -m pytest")
    assert "readme_command test" in (ROOT / ".ci" / "run").read_text()


def test_public_names_are_introduced():
    import echo_jax

    introduced = set(re.findall(r"`(\w+)`", README))
    public = {n for n in dir(echo_jax) if not n.startswith("_") and n[0].islower()}
    functions = {n for n in public if callable(getattr(echo_jax, n))}
    assert functions <= introduced
