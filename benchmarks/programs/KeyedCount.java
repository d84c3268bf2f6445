import java.util.Locale;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicBoolean;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.StreamsConfig;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Produced;

/**
 * Counts records by key, exactly once. Arguments: bootstrap servers, topic to read, topic to write, application id,
 * state directory, threads, commit interval in ms; then any number of settings, name=value.
 */
public class KeyedCount {
    public static void main(String[] arguments) throws InterruptedException {
        Properties config = new Properties();
        config.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        config.put(StreamsConfig.APPLICATION_ID_CONFIG, arguments[3]);
        config.put(StreamsConfig.STATE_DIR_CONFIG, arguments[4]);
        config.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, arguments[5]);
        config.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, arguments[6]);
        config.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, StreamsConfig.EXACTLY_ONCE_V2);
        config.put(StreamsConfig.consumerPrefix("auto.offset.reset"), "earliest");
        for (int at = 7; at < arguments.length; at++) {
            String[] setting = arguments[at].split("=", 2);
            config.put(setting[0], setting[1]);
        }

        AtomicBoolean first = new AtomicBoolean(true);
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(arguments[1], Consumed.with(Serdes.String(), Serdes.ByteArray()))
                .peek((key, value) -> {
                    if (first.get() && first.compareAndSet(true, false)) {
                        System.out.printf(Locale.ROOT, "FIRST %.3f%n", System.currentTimeMillis() / 1000.0);
                    }
                })
                .groupByKey(Grouped.with(Serdes.String(), Serdes.ByteArray()))
                .count()
                .toStream()
                .mapValues(String::valueOf)
                .to(arguments[2], Produced.with(Serdes.String(), Serdes.String()));

        KafkaStreams streams = new KafkaStreams(builder.build(), config);
        CountDownLatch failed = new CountDownLatch(1);
        streams.setUncaughtExceptionHandler(error -> {
            error.printStackTrace();
            failed.countDown();
            return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
        });
        Runtime.getRuntime().addShutdownHook(new Thread(streams::close));
        streams.start();
        failed.await();
        System.exit(1);
    }
}
