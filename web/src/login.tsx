import { useState } from "preact/hooks";
import { ApiError, useKey } from "./api";
import { TextField } from "./ui/field";

/** Asks for the server's API key. It is kept in memory only: a reload asks again. */
export function Login(props: { enter: () => Promise<void> }) {
  const [given, setGiven] = useState("");
  const [problem, setProblem] = useState("");
  const submit = async (event: Event) => {
    event.preventDefault();
    useKey(given.trim());
    try {
      await props.enter();
    } catch (error) {
      setProblem(error instanceof ApiError && error.status === 401 ? "This key is wrong." : String(error));
    }
  };
  return (
    <main>
      <form class="card stack login" onSubmit={submit}>
        <h1>Phalanx</h1>
        <TextField
          label="API key"
          value={given}
          onInput={setGiven}
          hint={problem}
          wrong={problem !== ""}
          input={{ type: "password", autoFocus: true }}
        />
        <button class="button primary" disabled={!given.trim()}>
          Log in
        </button>
      </form>
    </main>
  );
}
