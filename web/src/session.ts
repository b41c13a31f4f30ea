import { get } from "./api";

/** What this server is: an engine with a cockpit, or the planner alone. */
export interface About {
  mode: "serve" | "studio";
  version: string;
  /** The name clients ask for; null in the studio. */
  model: string | null;
  tp: number | null;
}

export const about = () => get<About>("cockpit/about");
