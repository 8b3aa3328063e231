# jaxstack on NVIDIA GPUs: docker build -f containers/gpu.Dockerfile -t jaxstack:gpu .
# The host needs a driver for CUDA 13 and the NVIDIA container toolkit; CUDA itself comes with the wheels of JAX.
# docker run --rm --gpus=all --shm-size=8g -v "$PWD/runs:/home/jaxstack/runs" jaxstack:gpu train --run.dir=runs/first
FROM python:3.12.12-slim-bookworm

COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never

RUN useradd --create-home --uid 1000 jaxstack
WORKDIR /opt/jaxstack
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY jaxstack ./jaxstack
COPY configs ./configs
RUN uv sync --locked --no-dev --no-editable --extra cuda13 --extra hf --extra serve && rm -rf /root/.cache

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/opt/jaxstack/.venv/bin:$PATH
USER jaxstack
WORKDIR /home/jaxstack
RUN mkdir runs
ENTRYPOINT ["jaxstack"]
CMD ["--help"]
