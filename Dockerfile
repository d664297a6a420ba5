# One image for gateway and worker. ENGINE=mock (the default) brings no torch; ENGINE=torch brings the real engine.
#
#   docker build -t vlm-fleet:mock .
#   docker build -t vlm-fleet:torch --build-arg ENGINE=torch .

FROM python:3.11-slim AS build
ARG ENGINE=mock
WORKDIR /build
RUN python -m venv /opt/vlm
ENV PATH=/opt/vlm/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# The dependencies alone first: they change less often than the code.
COPY pyproject.toml constraints.txt ./
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
print(*p['dependencies'], *p['optional-dependencies'].get('$ENGINE', []), sep='\n')" > requirements.txt \
    && pip install --constraint constraints.txt --requirement requirements.txt hatchling
COPY . .
RUN pip install --no-deps --no-build-isolation .

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home vlm && install --directory --owner vlm /models
COPY --from=build /opt/vlm /opt/vlm
ENV PATH=/opt/vlm/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER vlm
WORKDIR /home/vlm
ENTRYPOINT ["vlm"]
CMD ["--help"]
