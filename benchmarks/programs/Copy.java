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
import org.apache.kafka.streams.kstream.Produced;

/**
 * Copies a topic. Arguments: bootstrap servers, topic to read, topic to write, application id, state directory,
 * threads, processing guarantee, commit interval in ms, compression; then any number of settings, name=value.
 */
public class Copy {
    public static void main(String[] arguments) throws InterruptedException {
        Properties config = new Properties();
        config.put(StreamsConfig.BOOTSTRAP_SERVERS_CONFIG, arguments[0]);
        config.put(StreamsConfig.APPLICATION_ID_CONFIG, arguments[3]);
        config.put(StreamsConfig.STATE_DIR_CONFIG, arguments[4]);
        config.put(StreamsConfig.NUM_STREAM_THREADS_CONFIG, arguments[5]);
        config.put(StreamsConfig.PROCESSING_GUARANTEE_CONFIG, arguments[6]);
        config.put(StreamsConfig.COMMIT_INTERVAL_MS_CONFIG, arguments[7]);
        config.put(StreamsConfig.producerPrefix("compression.type"), arguments[8]);
        config.put(StreamsConfig.consumerPrefix("auto.offset.reset"), "earliest");
        for (int at = 9; at < arguments.length; at++) {
            String[] setting = arguments[at].split("=", 2);
            config.put(setting[0], setting[1]);
        }

        AtomicBoolean first = new AtomicBoolean(true);
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(arguments[1], Consumed.with(Serdes.ByteArray(), Serdes.ByteArray()))
                .peek((key, value) -> {
                    if (first.get() && first.compareAndSet(true, false)) {
                        System.out.printf(Locale.ROOT, "FIRST %.3f%n", System.currentTimeMillis() / 1000.0);
                    }
                })
                .to(arguments[2], Produced.with(Serdes.ByteArray(), Serdes.ByteArray()));

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
