import { useEffect, useState } from "preact/hooks";
import { ApiError, events, postStream } from "../api";
import { ofTab } from "../storage";
import { library, type Saved } from "./library";
import { requestOf, settings } from "./settings_store";
import { messagesOf, newTurn, take, type Chunk, type Turn } from "./turn";

const OPEN = "phalanx.open";
const LONGEST_TITLE = 60;

/** The conversation that is open. It lives here for as long as the page does, while views come and go; the library keeps
 * it beyond that, and this tab finds it again after a reload. */
export class Conversation {
  id = newId();
  title = "";
  turns: Turn[] = [];
  draft = "";
  /** The browser has no room for it. */
  unkept = false;
  running: AbortController | null = null;
  private keys = 0;
  private frame = 0;
  private listeners = new Set<() => void>();

  constructor() {
    const open = ofTab.get(OPEN);
    if (open !== null) this.open(open);
    addEventListener("pagehide", () => this.running && this.leave());
  }

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

  private add(role: Turn["role"], text: string, callId = ""): Turn {
    const turn = newTurn(this.keys++, role, text, callId);
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

  /** Begin a new one. */
  clear(): void {
    this.leave();
    this.show({ id: newId(), title: "", turns: [] });
    ofTab.remove(OPEN);
  }

  open(id: string): void {
    const saved = library.open(id);
    if (saved === null) return;
    this.leave();
    settings.change({ system: saved.system });
    this.show(saved);
    ofTab.set(OPEN, id);
  }

  rename(title: string): void {
    this.title = title.trim().slice(0, LONGEST_TITLE) || titleOf(this.turns);
    this.keep();
    this.changed();
  }

  /** Deletes it and begins a new one. Returns what is needed to bring it back. */
  remove(): Saved {
    this.leave();
    const removed = this.saved();
    library.remove(this.id);
    this.clear();
    return removed;
  }

  saved(): Saved {
    const { model, system } = settings.value;
    const turns = this.turns.map(({ tokens, ...turn }) => turn);
    return { id: this.id, title: this.title, changed: Date.now(), model, system, turns };
  }

  private show(saved: Pick<Saved, "id" | "title" | "turns">): void {
    this.id = saved.id;
    this.title = saved.title;
    this.unkept = false;
    this.turns = saved.turns.map((turn) => {
      const key = this.keys++;
      return { ...newTurn(key, turn.role, turn.text), ...turn, key };
    });
    this.changed();
  }

  /** Ends what runs, and keeps what has come of it. */
  private leave(): void {
    if (this.running === null) return;
    this.stop();
    this.running = null;
    this.last!.finish = "stopped";
    this.keep();
  }

  private keep(): void {
    this.title ||= titleOf(this.turns);
    ofTab.set(OPEN, this.id);
    this.unkept = !library.save(this.saved());
  }

  private async answer(): Promise<void> {
    const request = requestOf(settings.value, messagesOf(this.turns));
    const running = new AbortController();
    const turn = this.add("assistant", "");
    this.running = running;
    turn.sentAt = performance.now();
    this.keep();
    this.changed();
    try {
      await this.read(turn, await postStream("v1/chat/completions", request, running.signal));
    } catch (error) {
      if (running.signal.aborted) turn.finish = "stopped";
      else turn.error = error instanceof ApiError ? error.message : "The connection to the server was lost.";
    }
    if (this.running === running) {
      this.running = null;
      this.keep();
    }
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

/** Not a UUID: browsers make those over HTTPS alone. */
function newId(): string {
  return `${Date.now().toString(36)}${Math.random().toString(36).slice(2)}`;
}

/** The beginning of the first question. */
function titleOf(turns: Turn[]): string {
  const words = turns.find((turn) => turn.role === "user")?.text.trim().replace(/\s+/g, " ") ?? "";
  return words.length > LONGEST_TITLE ? `${words.slice(0, LONGEST_TITLE - 1)}…` : words;
}

export const conversation = new Conversation();

/** The conversation, drawn anew whenever it changes. */
export function useConversation(): Conversation {
  const [, redraw] = useState(0);
  useEffect(() => conversation.listen(() => redraw((count) => count + 1)), []);
  return conversation;
}
