import { useEffect, useState } from "preact/hooks";
import { ApiError, events, postStream } from "../api";
import { requestOf, settings } from "./settings_store";

/** A token of an answer, and those that were likely in its place. */
export interface Token {
  text: string;
  logprob: number;
  top: { text: string; logprob: number }[];
}

/** A call the model wrote; `result` is what the user will give back for it. */
export interface Call {
  id: string;
  name: string;
  arguments: string;
  result: string;
}

/** One message. Turns change in place while they stream; `version` counts the changes. */
export interface Turn {
  key: number;
  version: number;
  role: "user" | "assistant" | "tool";
  text: string;
  reasoning: string;
  calls: Call[];
  tokens: Token[];
  callId: string;
  error: string;
  finish: "" | "stop" | "length" | "tool_calls" | "stopped";
  sentAt: number;
  firstAt: number;
  lastAt: number;
  usage: { prompt: number; cached: number; output: number } | null;
}

interface Entry {
  token: string;
  logprob: number;
  bytes: number[] | null;
}

interface Chunk {
  error?: { message: string; code?: string };
  usage?: { prompt_tokens: number; completion_tokens: number; prompt_tokens_details?: { cached_tokens?: number } };
  choices?: {
    finish_reason: Turn["finish"] | null;
    delta: {
      content?: string | null;
      reasoning_content?: string | null;
      reasoning?: string | null;
      tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
    };
    logprobs?: { content?: (Entry & { top_logprobs: Entry[] })[] | null } | null;
  }[];
}

/** The conversation lives here, in memory, for as long as the page does: views come and go. */
class Conversation {
  turns: Turn[] = [];
  draft = "";
  running: AbortController | null = null;
  private keys = 0;
  private frame = 0;
  private listeners = new Set<() => void>();

  listen(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Tell the views, at most once per frame however fast tokens come. */
  changed(turn?: Turn): void {
    if (turn) turn.version++;
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      for (const listener of [...this.listeners]) listener();
    });
  }

  get last(): Turn | undefined {
    return this.turns.at(-1);
  }

  get lastQuestion(): Turn | undefined {
    return this.turns.findLast((turn) => turn.role === "user");
  }

  get canRegenerate(): boolean {
    return this.running === null && this.last?.role === "assistant";
  }

  add(role: Turn["role"], text: string, callId = ""): Turn {
    const turn: Turn = {
      key: this.keys++,
      version: 0,
      role,
      text,
      callId,
      reasoning: "",
      calls: [],
      tokens: [],
      error: "",
      finish: "",
      sentAt: 0,
      firstAt: 0,
      lastAt: 0,
      usage: null,
    };
    this.turns.push(turn);
    return turn;
  }

  send(text: string): void {
    this.add("user", text);
    void this.answer();
  }

  /** Ask the last question anew in other words. */
  resend(question: Turn, text: string): void {
    this.turns.length = this.turns.indexOf(question);
    this.send(text);
  }

  regenerate(): void {
    if (!this.canRegenerate) return;
    this.turns.pop();
    void this.answer();
  }

  giveResults(turn: Turn): void {
    for (const call of turn.calls) this.add("tool", call.result, call.id);
    void this.answer();
  }

  stop(): void {
    this.running?.abort();
  }

  clear(): void {
    this.stop();
    this.turns = [];
    this.changed();
  }

  private async answer(): Promise<void> {
    const request = requestOf(settings.value, messagesOf(this.turns));
    const running = new AbortController();
    const turn = this.add("assistant", "");
    this.running = running;
    turn.sentAt = performance.now();
    this.changed();
    try {
      await this.read(turn, await postStream("v1/chat/completions", request, running.signal));
    } catch (error) {
      if (running.signal.aborted) turn.finish = "stopped";
      else turn.error = error instanceof ApiError ? error.message : "The connection to the server was lost.";
    }
    if (this.running === running) this.running = null;
    this.changed(turn);
  }

  private async read(turn: Turn, reply: Response): Promise<void> {
    const decoder = new TextDecoder();
    for await (const data of events(reply)) {
      if (data === "[DONE]") return;
      take(turn, JSON.parse(data) as Chunk, decoder);
      this.changed(turn);
    }
    throw new ApiError(0, "cut_off", "The connection ended before the answer was complete.");
  }
}

function take(turn: Turn, chunk: Chunk, decoder: TextDecoder): void {
  if (chunk.error) throw new ApiError(0, chunk.error.code ?? "error", chunk.error.message);
  if (chunk.usage)
    turn.usage = {
      prompt: chunk.usage.prompt_tokens,
      cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
      output: chunk.usage.completion_tokens,
    };
  const choice = chunk.choices?.[0];
  if (!choice) return;
  turn.lastAt = performance.now();
  turn.firstAt ||= turn.lastAt;
  turn.text += choice.delta.content ?? "";
  turn.reasoning += choice.delta.reasoning_content ?? choice.delta.reasoning ?? "";
  for (const part of choice.delta.tool_calls ?? []) {
    const call = (turn.calls[part.index] ??= { id: "", name: "", arguments: "", result: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  for (const entry of choice.logprobs?.content ?? [])
    turn.tokens.push({
      text: entry.bytes ? decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token,
      logprob: entry.logprob,
      top: entry.top_logprobs.map((other) => ({ text: other.token, logprob: other.logprob })),
    });
  turn.finish = choice.finish_reason ?? turn.finish;
}

/** The messages as the API takes them; answers that never came are left out. */
function messagesOf(turns: Turn[]): object[] {
  return turns
    .filter((turn) => turn.role !== "assistant" || turn.text || turn.calls.length)
    .map((turn) => {
      if (turn.role === "user") return { role: "user", content: turn.text };
      if (turn.role === "tool") return { role: "tool", tool_call_id: turn.callId, content: turn.text };
      if (!turn.calls.length) return { role: "assistant", content: turn.text };
      return {
        role: "assistant",
        content: turn.text || null,
        reasoning_content: turn.reasoning || undefined,
        tool_calls: turn.calls.map((call) => ({
          id: call.id,
          type: "function",
          function: { name: call.name, arguments: call.arguments },
        })),
      };
    });
}

export const conversation = new Conversation();

/** The conversation, drawn anew whenever it changes. */
export function useConversation(): Conversation {
  const [, redraw] = useState(0);
  useEffect(() => conversation.listen(() => redraw((count) => count + 1)), []);
  return conversation;
}
