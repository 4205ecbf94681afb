# Longhaul in a container: docs/installing.md
FROM python:3.12.11-slim-bookworm

# torch.compile and Triton start a C compiler at run time; git names the code of a run.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc git libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# The packages of pyproject.toml first: a change of the code does not download torch again.
WORKDIR /source
COPY pyproject.toml ./
ARG EXTRAS="data s3"
# For CPUs: --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
ARG PIP_EXTRA_INDEX_URL=""
RUN python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*project['dependencies'], *sum((project['optional-dependencies'][extra] for extra in '$EXTRAS'.split()), []), sep='\n')" > /tmp/requirements.txt \
    && pip install --no-cache-dir --requirement /tmp/requirements.txt \
    && rm /tmp/requirements.txt

COPY README.md LICENSE MANIFEST.in train.py ./
COPY models models
COPY parallelisms parallelisms
COPY trainer trainer
COPY train_configs train_configs
COPY packages/longhaul packages/longhaul
RUN pip install --no-cache-dir --no-deps .

# Runs write to the folder that is mounted here, as the user that owns it: docker run --user
RUN useradd --create-home longhaul \
    && mkdir /runs \
    && chown longhaul /runs
USER longhaul
# A user given by docker run --user has no home; caches of models and kernels outlive the container here.
ENV HOME=/runs
WORKDIR /runs
ENTRYPOINT ["longhaul"]
CMD ["--help"]
