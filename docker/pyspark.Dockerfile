# PySpark with kafka-eos: docker compose run --rm pyspark kafka-eos doctor
FROM python:3.12-slim-bookworm AS wheel

# the base image pins the release of Debian
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml setup.py README.md LICENSE ./
COPY kafka_eos_source kafka_eos_source
COPY pyspark_kafka_eos pyspark_kafka_eos
COPY pyspark_kafka_eos_state pyspark_kafka_eos_state
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm

# the base image pins the release of Debian
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends openjdk-17-jre-headless procps \
    && rm -rf /var/lib/apt/lists/*
# python:*-slim has no C compiler, so the kernel comes with the wheel
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir /wheels/*.whl \
    # Python workers would import PySpark from this archive, and compile it each time
    && rm "$(python -c 'import pyspark, os; print(os.path.dirname(pyspark.__file__))')/python/lib/pyspark.zip"
RUN useradd --create-home --uid 1000 spark
USER 1000
WORKDIR /home/spark
ENV PYSPARK_PYTHON=/usr/local/bin/python
CMD ["kafka-eos", "doctor"]
