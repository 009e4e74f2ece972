// Asks two adapters the same question at once, then lists the slots of the device.
//
//   npm ci && npm run build
//   npm run two-adapters -- --first legal-brief --second creative-story "What is the sea like?"

import { parseArgs } from "node:util";

import { createClient, ConnectError } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";

import { AdapterService } from "../deltaplane/v1/adapters_pb.js";
import { FinishReason, GenerationService } from "../deltaplane/v1/generation_pb.js";

const { values, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    address: { type: "string", default: "localhost:50051" },
    "admin-address": { type: "string", default: "localhost:50052" },
    first: { type: "string", default: "legal-brief" },
    second: { type: "string", default: "creative-story" },
    "max-tokens": { type: "string", default: "48" },
  },
});
const question = positionals[0] ?? "What is the sea like?";

const transport = (address: string) => createGrpcTransport({ baseUrl: `http://${address}` });
const generation = createClient(GenerationService, transport(values.address));
const adapters = createClient(AdapterService, transport(values["admin-address"]));

async function stream(adapter: string): Promise<void> {
  const responses = generation.generate({
    adapter,
    prompt: { case: "messages", value: { messages: [{ role: "user", content: question }] } },
    sampling: { temperature: 0 },
    stop: { maxTokens: Number(values["max-tokens"]) },
  });
  for await (const response of responses) {
    if (response.text !== "") console.log(`${adapter}: ${JSON.stringify(response.text)}`);
    if (response.finish) console.log(`${adapter} finished: ${FinishReason[response.finish.reason]}`);
    if (response.usage) console.log(`${adapter} tokens: ${response.usage.completionTokens}`);
  }
}

try {
  await Promise.all([stream(values.first), stream(values.second)]);
  const { slots } = await adapters.listSlots({});
  for (const slot of slots) {
    console.log(`slot ${slot.slot}: ${slot.adapter === "" ? "free" : `${slot.adapter} version ${slot.version}`}`);
  }
} catch (error) {
  console.error(`two_adapters: ${ConnectError.from(error).message}`);
  process.exitCode = 1;
}
