# @title Install jaxstack, and check that JAX uses the GPU or TPU of this machine { display-mode: "form" }
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

EXTRAS = []


def accelerator() -> tuple[str, str]:
    """Returns the platform of JAX for the chip of this machine, and the extra that it needs."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu", ""
    if shutil.which("nvidia-smi") and not subprocess.run(["nvidia-smi"], capture_output=True).returncode:
        return "gpu", "cuda12"
    if "TPU_ACCELERATOR_TYPE" in os.environ or [*Path("/dev").glob("accel[0-9]*")]:
        return "tpu", "tpu"
    return "cpu", ""


platform, extra = accelerator()
if importlib.util.find_spec("jaxstack") is None:
    extras = ",".join([*EXTRAS, *filter(None, [extra])])
    package = f"jaxstack[{extras}]" if extras else "jaxstack"
    print(f"installing {package}, one to three minutes")
    source = f"{package} @ git+https://github.com/jaxstack/jaxstack"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", source], check=True)
# Another process imports JAX here, because JAX reads its settings at the import and later cells may change them.
code = "import jax; device = jax.devices()[0]; print(jax.__version__, device.platform, device.device_kind, sep=chr(10))"
asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
version, used, kind = asked.stdout.split("\n")[:3] if asked.returncode == 0 else ("", "", "")
if (asked.returncode or used != platform) and "jax" in sys.modules:  # run again: a TPU serves this process alone
    device = sys.modules["jax"].devices()[0]
    version, used, kind = importlib.metadata.version("jax"), device.platform, device.device_kind
if used != platform != "cpu" or not used:
    print(asked.stderr[-2000:])
    raise RuntimeError(
        f"this machine has a {platform.upper()}, but JAX {version} runs on {used or 'nothing'}. Restart the session, run "
        f"`%pip install -U 'jax[{extra or 'cpu'}]'`, and run this cell again. To use the CPU, set "
        f"os.environ['JAX_PLATFORMS'] = 'cpu' before it."
    )
if getattr(sys.modules.get("jax"), "__version__", version) != version:
    raise RuntimeError(
        f"JAX was imported before {version} was installed. Restart the session, and run this cell again."
    )
print(f"JAX {version} runs on {kind}")
