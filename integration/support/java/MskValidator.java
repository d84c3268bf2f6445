package test;

import java.lang.instrument.Instrumentation;
import java.net.URI;
import java.net.URLDecoder;
import java.net.URLEncoder;
import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.time.Instant;
import java.time.ZoneOffset;
import java.time.format.DateTimeFormatter;
import java.util.Base64;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import javax.crypto.Mac;
import javax.crypto.spec.SecretKeySpec;
import javax.security.auth.callback.Callback;
import javax.security.auth.login.AppConfigurationEntry;
import org.apache.kafka.common.security.auth.AuthenticateCallbackHandler;
import org.apache.kafka.common.security.oauthbearer.OAuthBearerExtensionsValidatorCallback;
import org.apache.kafka.common.security.oauthbearer.OAuthBearerToken;
import org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallback;

/**
 * Checks tokens of Amazon MSK in a broker: base64 of a URL that is signed with Signature Version 4.
 *
 * <p>The options of the JAAS entry are access keys and their secrets, and {@code region}. The principal is the
 * access key. Each token that is accepted ends a session after the time that it has left.
 */
public final class MskValidator implements AuthenticateCallbackHandler {
    private static final DateTimeFormatter TIME =
        DateTimeFormatter.ofPattern("yyyyMMdd'T'HHmmss'Z'").withZone(ZoneOffset.UTC);

    private Map<String, ?> options;

    /** Puts this class into the broker's class path; the JVM calls it because the jar is an agent. */
    public static void premain(String arguments, Instrumentation instrumentation) {
    }

    @Override
    public void configure(Map<String, ?> config, String mechanism, List<AppConfigurationEntry> entries) {
        options = entries.get(0).getOptions();
    }

    @Override
    public void close() {
    }

    @Override
    public void handle(Callback[] callbacks) {
        for (Callback each : callbacks) {
            if (each instanceof OAuthBearerValidatorCallback callback) {
                try {
                    callback.token(validated(callback.tokenValue()));
                } catch (Exception refused) {
                    callback.error("invalid_token: " + refused.getMessage(), null, null);
                }
            } else if (each instanceof OAuthBearerExtensionsValidatorCallback callback) {
                callback.inputExtensions().map().keySet().forEach(callback::valid);
            }
        }
    }

    private OAuthBearerToken validated(String value) throws Exception {
        URI url = new URI(new String(Base64.getUrlDecoder().decode(value), StandardCharsets.UTF_8));
        Map<String, String> given = new TreeMap<>();
        for (String each : url.getRawQuery().split("&")) {
            String[] parts = each.split("=", 2);
            given.put(decoded(parts[0]), decoded(parts[1]));
        }
        String[] credential = given.get("X-Amz-Credential").split("/", 2);
        String region = (String) options.get("region");
        String secret = (String) options.get(credential[0]);
        String day = given.get("X-Amz-Date").substring(0, 8);
        long begins = TIME.parse(given.get("X-Amz-Date"), Instant::from).toEpochMilli();
        long ends = begins + 1000 * Long.parseLong(given.get("X-Amz-Expires"));
        require(given.get("Action").equals("kafka-cluster:Connect"), "action");
        require(url.getScheme().equals("https"), "scheme");
        require(url.getHost().equals("kafka." + region + ".amazonaws.com"), "host");
        require(given.get("X-Amz-Algorithm").equals("AWS4-HMAC-SHA256"), "algorithm");
        require(given.get("X-Amz-SignedHeaders").equals("host"), "headers");
        require(given.containsKey("User-Agent"), "user agent");
        require(secret != null, "access key");
        require(credential[1].equals(day + "/" + region + "/kafka-cluster/aws4_request"), "scope");
        require(Math.abs(begins - System.currentTimeMillis()) < 300_000, "time");
        require(ends > System.currentTimeMillis() && ends - begins <= 900_000, "expiry");
        String signature = given.remove("X-Amz-Signature");
        given.remove("User-Agent");
        StringBuilder query = new StringBuilder();
        given.forEach((name, each) ->
            query.append(query.isEmpty() ? "" : "&").append(encoded(name)).append('=').append(encoded(each)));
        String canonical = "GET\n/\n" + query + "\nhost:" + url.getHost() + "\n\nhost\n" + hash("");
        String text = "AWS4-HMAC-SHA256\n" + given.get("X-Amz-Date") + "\n" + credential[1] + "\n" + hash(canonical);
        byte[] key = ("AWS4" + secret).getBytes(StandardCharsets.UTF_8);
        for (String each : credential[1].split("/")) {
            key = signed(key, each);
        }
        require(HexFormat.of().formatHex(signed(key, text)).equals(signature), "signature");
        // the broker ends the session with the token; a test may ask for an earlier end
        Object seconds = options.get("seconds");
        long expires = seconds == null
            ? ends : Math.min(ends, System.currentTimeMillis() + 1000 * Long.parseLong((String) seconds));
        return new OAuthBearerToken() {
            @Override
            public String value() {
                return value;
            }

            @Override
            public Set<String> scope() {
                return Set.of();
            }

            @Override
            public long lifetimeMs() {
                return expires;
            }

            @Override
            public String principalName() {
                return credential[0];
            }

            @Override
            public Long startTimeMs() {
                return begins;
            }
        };
    }

    private static void require(boolean holds, String what) {
        if (!holds) {
            throw new IllegalArgumentException("wrong " + what);
        }
    }

    private static String decoded(String text) {
        return URLDecoder.decode(text, StandardCharsets.UTF_8);
    }

    private static String encoded(String text) {
        return URLEncoder.encode(text, StandardCharsets.UTF_8).replace("+", "%20").replace("*", "%2A").replace("%7E", "~");
    }

    private static String hash(String text) throws Exception {
        return HexFormat.of().formatHex(
            MessageDigest.getInstance("SHA-256").digest(text.getBytes(StandardCharsets.UTF_8)));
    }

    private static byte[] signed(byte[] key, String text) throws Exception {
        Mac mac = Mac.getInstance("HmacSHA256");
        mac.init(new SecretKeySpec(key, "HmacSHA256"));
        return mac.doFinal(text.getBytes(StandardCharsets.UTF_8));
    }
}
