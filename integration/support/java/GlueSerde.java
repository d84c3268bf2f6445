import com.amazonaws.services.schemaregistry.deserializers.GlueSchemaRegistryKafkaDeserializer;
import com.amazonaws.services.schemaregistry.serializers.GlueSchemaRegistryKafkaSerializer;
import com.amazonaws.services.schemaregistry.serializers.json.JsonDataWithSchema;
import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.google.protobuf.DescriptorProtos.FileDescriptorProto;
import com.google.protobuf.DescriptorProtos.FileDescriptorSet;
import com.google.protobuf.Descriptors.Descriptor;
import com.google.protobuf.Descriptors.FileDescriptor;
import com.google.protobuf.DynamicMessage;
import com.google.protobuf.Message;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.ArrayList;
import java.util.Base64;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.io.DecoderFactory;
import software.amazon.awssdk.auth.credentials.AwsBasicCredentials;
import software.amazon.awssdk.auth.credentials.StaticCredentialsProvider;

/**
 * Writes and reads records with AWS Glue's own serializer. Each line of the input is a JSON object that says what
 * to do; each line of the output is the answer.
 */
public class GlueSerde {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final StaticCredentialsProvider LOGIN =
        StaticCredentialsProvider.create(AwsBasicCredentials.create("test", "test"));

    public static void main(String[] arguments) throws Exception {
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode asked = JSON.readTree(line);
            Map<String, String> answer = new HashMap<>();
            try {
                if (asked.has("bytes")) {
                    answer.put("value", read(asked));
                } else {
                    answer.put("bytes", Base64.getEncoder().encodeToString(write(asked)));
                }
            } catch (Exception error) {
                StringBuilder text = new StringBuilder();
                for (Throwable each = error; each != null; each = each.getCause()) {
                    text.append(each).append("; ");
                }
                answer.put("error", text.toString());
            }
            System.out.println(JSON.writeValueAsString(answer));
        }
    }

    private static Map<String, Object> options(JsonNode asked) {
        Map<String, Object> options = new HashMap<>();
        asked.get("options").fields().forEachRemaining(each -> options.put(each.getKey(), each.getValue().asText()));
        return options;
    }

    private static byte[] write(JsonNode asked) throws Exception {
        try (GlueSchemaRegistryKafkaSerializer serializer =
            new GlueSchemaRegistryKafkaSerializer(LOGIN, options(asked))) {
            return serializer.serialize(asked.get("topic").asText(), value(asked));
        }
    }

    private static String read(JsonNode asked) throws Exception {
        try (GlueSchemaRegistryKafkaDeserializer deserializer =
            new GlueSchemaRegistryKafkaDeserializer(LOGIN, options(asked))) {
            byte[] bytes = Base64.getDecoder().decode(asked.get("bytes").asText());
            Object found = deserializer.deserialize(asked.get("topic").asText(), bytes);
            if (found instanceof JsonDataWithSchema) {
                return ((JsonDataWithSchema) found).getPayload();
            }
            if (found instanceof Message) {
                Message message = (Message) found;
                return message.getDescriptorForType().getFullName() + " "
                    + Base64.getEncoder().encodeToString(message.toByteArray());
            }
            return found.toString();
        }
    }

    private static Object value(JsonNode asked) throws Exception {
        String data = asked.get("data").asText();
        switch (asked.get("options").get("dataFormat").asText()) {
            case "AVRO":
                Schema schema = new Schema.Parser().parse(asked.get("schema").asText());
                return new GenericDatumReader<>(schema).read(null, DecoderFactory.get().jsonDecoder(schema, data));
            case "JSON":
                return JsonDataWithSchema.builder(asked.get("schema").asText(), data).build();
            default:
                return DynamicMessage.parseFrom(descriptor(asked), Base64.getDecoder().decode(data));
        }
    }

    /** Finds a message in a set of files, each of which comes after those that it imports. */
    private static Descriptor descriptor(JsonNode asked) throws Exception {
        List<FileDescriptor> files = new ArrayList<>();
        byte[] set = Base64.getDecoder().decode(asked.get("files").asText());
        for (FileDescriptorProto each : FileDescriptorSet.parseFrom(set).getFileList()) {
            files.add(FileDescriptor.buildFrom(each, files.toArray(new FileDescriptor[0])));
        }
        FileDescriptor file = files.get(files.size() - 1);
        String[] path = asked.get("message").asText().split("\\.");
        Descriptor found = file.findMessageTypeByName(path[0]);
        for (int at = 1; at < path.length; at++) {
            found = found.findNestedTypeByName(path[at]);
        }
        return found;
    }
}
