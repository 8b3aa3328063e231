# jaxstack on CPUs: docker build -f containers/cpu.Dockerfile -t jaxstack:cpu .
# docker run --rm -v "$PWD/runs:/home/jaxstack/runs" jaxstack:cpu train --run.dir=runs/first
FROM python:3.12.12-slim-bookworm

COPY --from=ghcr.io/astral-sh/uv:0.13.9 /uv /usr/local/bin/uv
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never

RUN useradd --create-home --uid 1000 jaxstack
WORKDIR /opt/jaxstack
COPY pyproject.toml uv.lock README.md LICENSE ./
COPY jaxstack ./jaxstack
COPY configs ./configs
RUN uv sync --locked --no-dev --no-editable --extra hf --extra serve && rm -rf /root/.cache

ENV PATH=/opt/jaxstack/.venv/bin:$PATH
USER jaxstack
WORKDIR /home/jaxstack
RUN mkdir runs
ENTRYPOINT ["jaxstack"]
CMD ["--help"]
