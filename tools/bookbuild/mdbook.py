"""Find mdBook 0.5, or fetch Debian's build of it through apt without installing it."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

# The C library comes along because the build is newer than most machines' own.
PACKAGES = ("mdbook", "node-fortawesome-fontawesome-free", "libc6", "libgcc-s1")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
MINIMUM = (0, 5)

# Started from its own folder, so that the relative path of its icons holds.
START = """\
#!/bin/sh
cd "$(dirname "$0")" || exit
exec {loader} --library-path {libraries} usr/bin/mdbook "$@"
"""


def version(mdbook: str | Path) -> tuple[int, ...]:
    """The version that ``mdbook --version`` tells; (0,) if it does not start."""
    try:
        result = subprocess.run([mdbook, "--version"], capture_output=True, text=True)
    except OSError:
        return (0,)
    match = re.search(r"v?(\d+)\.(\d+)\.(\d+)", result.stdout)
    return tuple(map(int, match.groups())) if match else (0,)


def find(cache: Path) -> str | None:
    """An mdBook of at least version 0.5: on PATH, in ``cache``, or fetched there."""
    cached = cache / "unpacked" / "mdbook"
    for candidate in (shutil.which("mdbook"), cached):
        if candidate and version(candidate) >= MINIMUM:
            return str(candidate)
    for archive in debian_archives():
        print(f"fetching mdBook from Debian testing into {cache}", file=sys.stderr)
        shutil.rmtree(cache, ignore_errors=True)
        if fetch(archive, cache) and version(cached) >= MINIMUM:
            return str(cached)
    return None


def debian_archives() -> list[str]:
    """Addresses in this machine's own apt sources where Debian's suites may be had."""
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        return []
    if platform.freedesktop_os_release().get("ID") != "debian":
        return []
    wanted = "$(REPO_URI) $(RELEASE) $(COMPONENT)"
    command = ["apt-get", "indextargets", "--format", wanted, "Created-By: Packages"]
    listed = subprocess.run(command, capture_output=True, text=True)
    # Releases such as bookworm-security live in archives without the newer suites.
    names = re.findall(r"^(\S+) [^\s-]+ main$", listed.stdout, re.MULTILINE)
    return list(dict.fromkeys(names))


def fetch(archive: str, cache: Path) -> bool:
    """Download PACKAGES of Debian testing, unpack them; False where that fails.

    apt keeps its own settings (proxies, credentials) but reads this one source and
    writes below ``cache`` only, so neither root nor the machine's lists are needed.
    """
    state, packages, unpacked = (cache / n for n in ("apt", "packages", "unpacked"))
    for folder in (state / "lists/partial", state / "archives/partial", packages):
        folder.mkdir(parents=True)
    sources = state / "sources.list"
    sources.write_text(f"deb [signed-by={KEYRING}] {archive} testing main\n")
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::Etc::preferencesparts": "/dev/null",
        "Dir::State": state,
        "Dir::State::status": "/dev/null",
        "Dir::Cache": state,
        "APT::Sandbox::User": "",
        "Acquire::Languages": "none",
        "Acquire::Retries": 1,
        "Acquire::http::Timeout": 20,
        "Acquire::https::Timeout": 20,
    }
    apt = ["apt-get", "-q", *(f"-o{key}={value}" for key, value in options.items())]

    def run(*command: str | Path) -> None:
        subprocess.run(
            command, cwd=packages, check=True, timeout=300, stdout=subprocess.DEVNULL
        )

    try:
        run(*apt, "update")
        run(*apt, "download", *PACKAGES)
        for package in packages.glob("*.deb"):
            run("dpkg", "-x", package, unpacked)
        make_startable(unpacked)
    except (subprocess.SubprocessError, OSError, StopIteration) as error:
        print(f"no mdBook from there: {error}", file=sys.stderr)
        return False
    shutil.rmtree(state)
    shutil.rmtree(packages)
    return True


def make_startable(unpacked: Path) -> None:
    """Write ``unpacked/mdbook``, which starts mdBook with the C library beside it."""
    program = unpacked / "usr/bin/mdbook"
    # It looks for its icons under /usr/share, where only root may put them. The path
    # of equal length without the leading slash is looked for in the current folder.
    icons = b"/usr/share/nodejs/@fortawesome"
    local = icons.removeprefix(b"/").replace(b"usr/", b"usr//")
    program.write_bytes(program.read_bytes().replace(icons, local))
    # Of the loader's two names one is a link that leads out of the folder.
    loader = next(p for p in unpacked.glob("usr/lib*/**/ld-linux-*.so.*") if p.exists())
    libraries = next(unpacked.glob("usr/lib/*/libc.so.6")).parent
    start = unpacked / "mdbook"
    start.write_text(
        START.format(
            loader=loader.relative_to(unpacked),
            libraries=libraries.relative_to(unpacked),
        )
    )
    os.chmod(start, 0o755)
