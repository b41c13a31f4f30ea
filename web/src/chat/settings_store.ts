import { useEffect, useState } from "preact/hooks";

/** How to ask, as the controls hold it. */
export interface Settings {
  model: string;
  system: string;
  temperature: number;
  topP: number;
  topK: number;
  minP: number;
  maxTokens: number;
  seed: string;
  probabilities: boolean;
  tools: string;
  toolChoice: "auto" | "required" | "none";
}

const TOP_LOGPROBS = 5;

let listeners: (() => void)[] = [];

/** In memory only; the system prompt is kept with its conversation. */
export const settings = {
  value: {
    model: "",
    system: "",
    temperature: 0.6,
    topP: 0.95,
    topK: 0,
    minP: 0,
    maxTokens: 1024,
    seed: "",
    probabilities: false,
    tools: "",
    toolChoice: "auto",
  } as Settings,
  change(part: Partial<Settings>): void {
    settings.value = { ...settings.value, ...part };
    for (const listener of listeners) listener();
  },
};

export function useSettings(): Settings {
  const [value, setValue] = useState(settings.value);
  useEffect(() => {
    const changed = () => setValue(settings.value);
    listeners.push(changed);
    return () => void (listeners = listeners.filter((each) => each !== changed));
  }, []);
  return value;
}

/** What is wrong with a text that should be a JSON list of tools; empty when nothing is. */
export function toolsProblem(text: string): string {
  if (!text.trim()) return "";
  try {
    const tools: unknown = JSON.parse(text);
    if (!Array.isArray(tools)) return "A JSON list is needed: [ … ].";
    const nameless = tools.findIndex((tool) => typeof tool?.function?.name !== "string");
    return nameless < 0 ? "" : `Tool ${nameless + 1} has no function.name.`;
  } catch (error) {
    return (error as Error).message;
  }
}

export function seedProblem(text: string): string {
  return /^(-?\d{1,15})?$/.test(text.trim()) ? "" : "A whole number, or empty.";
}

/** The body of a request to `/v1/chat/completions`. */
export function requestOf(given: Settings, messages: object[]): object {
  const system = given.system.trim() ? [{ role: "system", content: given.system }] : [];
  const tools = given.tools.trim() && !toolsProblem(given.tools) ? (JSON.parse(given.tools) as object[]) : [];
  const seeded = given.seed.trim() && !seedProblem(given.seed);
  return {
    model: given.model,
    messages: [...system, ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    temperature: given.temperature,
    top_p: given.topP,
    top_k: given.topK,
    min_p: given.minP,
    max_tokens: given.maxTokens,
    ...(seeded ? { seed: Number(given.seed) } : {}),
    ...(given.probabilities ? { logprobs: true, top_logprobs: TOP_LOGPROBS } : {}),
    ...(tools.length ? { tools, tool_choice: given.toolChoice } : {}),
  };
}
